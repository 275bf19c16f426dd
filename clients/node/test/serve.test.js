// serveEnvironment against a server of this test.

import assert from 'node:assert/strict';
import { mock, test } from 'node:test';
import grpc from '@grpc/grpc-js';
import { EnvironmentService } from '../src/contract.js';
import { serveEnvironment } from '../src/index.js';

const game = () => ({ maxTurns: 1, reset: () => ['', {}], step: () => ['', 0, true, false, {}] });

/** Runs `work` with the address of a server whose `Attach` is `attach`. */
async function withServer(attach, work) {
  const server = new grpc.Server();
  server.addService(EnvironmentService.service, { Attach: attach });
  const port = await new Promise((resolve, reject) => {
    const credentials = grpc.ServerCredentials.createInsecure();
    server.bindAsync('127.0.0.1:0', credentials, (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  try {
    await work(`127.0.0.1:${port}`);
  } finally {
    server.forceShutdown();
  }
}

test('a provider that is stopped while it attaches ends', { timeout: 15_000 }, async () => {
  mock.method(console, 'error', () => {});
  const stop = new AbortController();
  const seen = [];
  const attach = (call) => {
    call.on('data', (message) => {
      seen.push(message.message);
      if (message.hello) {
        stop.abort();
        setImmediate(() => call.write({ welcome: { lease: { seconds: 30, nanos: 0 } } }));
      }
    });
    call.on('end', () => call.end());
  };
  await withServer(attach, (target) => serveEnvironment(target, { Game: game }, { signal: stop.signal }));
  assert.deepEqual(seen, ['hello', 'drain']);
});

test('what describes an environment is checked', async () => {
  class Game {
    static metricAggregation = { found: 'median' };
    maxTurns = 1;
    reset() {}
    step() {}
  }
  await assert.rejects(serveEnvironment('127.0.0.1:1', { Game: () => new Game() }), /median for found; allowed: mean, sum/);
});
