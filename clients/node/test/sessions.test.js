// Sessions without a server: what an environment throws is a failure for the caller and a stack trace for its author.

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
