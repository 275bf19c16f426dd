// node examples/serve_frozen_lake.js HOST:PORT [TAG [CAPACITY]]

import { serveEnvironment } from '../src/index.js';
import { FrozenLake } from './frozen_lake.js';

const [target = '127.0.0.1:7001', tag = 'FrozenLakeNode', capacity = '64'] = process.argv.slice(2);
try {
  await serveEnvironment(target, { [tag]: (options) => new FrozenLake(options) }, { capacity: Number(capacity) });
} catch (error) {
  console.error(`rollwire: ${error.message}`);
  process.exitCode = 1;
}
