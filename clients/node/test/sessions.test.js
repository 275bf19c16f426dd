// Sessions without a server: what environments do wrong is a failure for the caller, and all of them are closed.

import assert from 'node:assert/strict';
import { mock, test } from 'node:test';
import { Sessions } from '../src/sessions.js';

class Broken {
  maxTurns = 3;

  reset() {
    return ['begin', {}];
  }

  step() {
    throw new RangeError('out of cards');
  }
}

test('an error is printed with its stack trace, and the caller gets one line', async () => {
  const printed = mock.method(console, 'error', () => {});
  const sessions = new Sessions({ Broken: () => new Broken() }, 1);
  const timeout = { seconds: 60, nanos: 0 };
  const request = { request_id: 'one', environment_tag: 'Broken', seed: '1' };
  const { open } = await sessions.answer({ call_id: 1, call: 'open', timeout, open: request });
  const step = { session_id: open.session_id, turn: 0, action: 'draw' };
  const reply = await sessions.answer({ call_id: 2, call: 'step', timeout, step });
  const message = 'out of cards';
  assert.deepEqual(reply.step.failure, { kind: 'ENVIRONMENT_FAILURE_KIND_ERROR', type: 'RangeError', message });
  assert.match(printed.mock.calls[0].arguments[0], /an environment failed: RangeError: out of cards\n +at Broken\.step/);
});

const TIMEOUT = { seconds: 60, nanos: 0 };
const SOON = { seconds: 0, nanos: 20_000_000 };

/** A game whose calls end when the test says so; `log` holds what was called. */
class Slow {
  maxTurns = 3;
  log = [];
  gates = [];

  wait(what, value) {
    this.log.push(what);
    return new Promise((resolve) => this.gates.push(() => resolve(value)));
  }

  reset() {
    return this.slowReset ? this.wait('reset', ['begin', {}]) : ['begin', {}];
  }

  step() {
    return this.wait('step', ['on', 0, false, false, {}]);
  }

  renderText() {
    this.log.push('render');
    return 'drawn';
  }

  close() {
    this.log.push('close');
  }
}

/** Opens a session of an environment; returns the reply and what makes further calls. */
async function opened(environment, timeout = TIMEOUT) {
  const sessions = new Sessions({ Game: () => environment }, 1);
  const request = { request_id: 'one', environment_tag: 'Game', seed: '1' };
  const { open } = await sessions.answer({ call_id: 1, call: 'open', timeout, open: request });
  const call = (kind, fields = {}, limit = TIMEOUT) => {
    const message = { session_id: open.session_id, ...fields };
    return sessions.answer({ call_id: 2, call: kind, timeout: limit, [kind]: message });
  };
  return { open, call };
}

/** Lets everything run that can. */
const settled = () => new Promise((resolve) => setImmediate(resolve));

test('an environment that fails to start is closed', async () => {
  mock.method(console, 'error', () => {});
  const game = new Slow();
  game.reset = () => 'no list';
  const { open } = await opened(game);
  assert.equal(open.failure.type, 'InvalidResult');
  await settled();
  assert.deepEqual(game.log, ['close']);
});

test('an environment that was given up is closed when it comes back', async () => {
  mock.method(console, 'error', () => {});
  const starting = Object.assign(new Slow(), { slowReset: true });
  assert.equal((await opened(starting, SOON)).open.failure.type, 'Timeout');
  const playing = new Slow();
  const { call } = await opened(playing);
  assert.equal((await call('step', { turn: 0, action: '' }, SOON)).step.failure.type, 'Timeout');
  await call('close');
  await settled();
  assert.deepEqual([starting.log, playing.log], [['reset'], ['step']]);
  for (const game of [starting, playing]) game.gates[0]();
  await settled();
  assert.deepEqual([starting.log, playing.log], [['reset', 'close'], ['step', 'close']]);
});

test('the calls of one episode never overlap', async () => {
  const game = new Slow();
  const { call } = await opened(game);
  const step = call('step', { turn: 0, action: '' });
  const render = call('render', { format: 'RENDER_FORMAT_TEXT' });
  await settled();
  assert.deepEqual(game.log, ['step']);
  game.gates[0]();
  assert.equal((await step).step.observation, 'on');
  assert.equal((await render).render.text, 'drawn');
});

test('half of a character is no text, wherever it comes from', async () => {
  mock.method(console, 'error', () => {});
  const half = '🙂'.slice(0, 1);
  const game = new Slow();
  game.step = () => [half, 0, false, false, {}];
  const told = (await (await opened(game)).call('step', { turn: 0, action: '' })).step.failure;
  assert.equal(told.type, 'InvalidResult');
  assert.match(told.message, /the observation holds half of a surrogate pair/);
  game.step = () => {
    throw new Error(`${'x'.repeat(999)}🙂`);
  };
  const { failure } = (await (await opened(game)).call('step', { turn: 0, action: '' })).step;
  assert.ok(failure.message.isWellFormed());
});

test('an opening that comes again is answered as before, however many others have failed', async () => {
  mock.method(console, 'error', () => {});
  const first = Object.assign(new Slow(), { slowReset: true });
  let made = 0;
  const make = () => (made++ === 0 ? first : Object.assign(new Slow(), { reset: () => null }));
  const sessions = new Sessions({ Game: make }, 2);
  const open = (request_id) => {
    const request = { request_id, environment_tag: 'Game', seed: '1' };
    return sessions.answer({ call_id: 1, call: 'open', timeout: TIMEOUT, open: request });
  };
  const slow = open('slow');
  for (let number = 0; number < 10; number += 1) assert.ok((await open(`failing ${number}`)).open.failure);
  const again = open('slow');
  first.gates[0]();
  assert.equal((await again).open.session_id, (await slow).open.session_id);
  assert.equal(sessions.ids.length, 1);
});
