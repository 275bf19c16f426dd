// Serve environments written in JavaScript to a Rollwire environment server.

export { serveEnvironment } from './serve.js';
