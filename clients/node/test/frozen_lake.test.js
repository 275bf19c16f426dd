// The game alone: maps follow from the seed and can be won; answers are parsed as the server's own environment does.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { FrozenLake } from '../examples/frozen_lake.js';

const NAMES = ['Left', 'Down', 'Right', 'Up'];

/** Returns the shortest way to the goal, by playing. */
function solve(seed) {
  const frontier = [[]];
  const seen = new Set();
  for (const path of frontier) {
    const lake = new FrozenLake({ max_steps: 99 });
    lake.reset(seed);
    let reply;
    for (const name of path) reply = lake.step(`<answer>${name}</answer>`);
    if (reply?.[1] === 1) return path;
    if (seen.has(lake.player) || reply?.[2]) continue;
    seen.add(lake.player);
    for (const name of NAMES) frontier.push([...path, name]);
  }
  return null;
}

test('every map can be won, and the same seed gives the same map', () => {
  for (let seed = 0n; seed < 20n; seed += 1n) {
    const [first] = new FrozenLake().reset(seed);
    const [second] = new FrozenLake().reset(seed);
    assert.equal(first, second);
    assert.ok(solve(seed), `seed ${seed}`);
  }
});

test('an answer without a legal action costs a little', () => {
  const lake = new FrozenLake();
  lake.reset(1n);
  const [, reward, terminated, , info] = lake.step('I go left.');
  assert.deepEqual([reward, terminated, info.metrics.action_is_valid], [-0.01, false, 0]);
});

test('tokens of the chat format are ignored', () => {
  const lake = new FrozenLake();
  lake.reset(1n);
  assert.equal(lake.step('<|im_start|><answer> RIGHT </answer><|im_end|>')[4].metrics.action_is_valid, 1);
});

test('options are checked', () => {
  assert.throws(() => new FrozenLake({ size: 1 }), /allowed: 2 to 64/);
  assert.throws(() => new FrozenLake({ colour: 'red' }), /allowed: size, p/);
});

test('the last turn truncates', () => {
  const lake = new FrozenLake({ max_steps: 1 });
  lake.reset(3n);
  assert.equal(lake.step('nothing')[3], true);
});
