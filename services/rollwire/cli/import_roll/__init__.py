"""`rollwire config import-roll`: a configuration of ROLL's agentic pipeline becomes one of Rollwire's."""
