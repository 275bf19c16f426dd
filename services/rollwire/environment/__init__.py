"""Environment server: sessions, the built-in games and their registry."""
