// From what an environment returned or threw to messages of the contract. Nothing invalid gets through.

import { MAX_METRICS, METRIC_NAME, MIB } from './contract.js';

const MAX_FAILURE_CHARACTERS = 1000;
const MODES = ['mean', 'sum', 'last', 'first', 'max', 'min'];
const PATHS = /(?<![\w/<])(?:\/[\w.@+~%-]+){2,}\/?/g;

/** The environment returned something outside the contract. */
export class InvalidResult extends Error {}

/** The environment did not answer in time. */
export class TurnTimeout extends Error {}

/** Describes what an environment threw: type and one line, without paths and stack traces. */
export function failureOf(error) {
  let kind = 'ENVIRONMENT_FAILURE_KIND_ERROR';
  let type = error?.constructor?.name || typeof error;
  if (error instanceof InvalidResult) [kind, type] = ['ENVIRONMENT_FAILURE_KIND_INVALID_RESULT', 'InvalidResult'];
  if (error instanceof TurnTimeout) [kind, type] = ['ENVIRONMENT_FAILURE_KIND_TIMEOUT', 'Timeout'];
  const text = String(error?.message ?? error).replace(PATHS, '<path>').replace(/[\s\p{C}]+/gu, ' ').trim();
  // A cut may go through a character.
  return { kind, type: type.slice(0, 128).toWellFormed(), message: text.slice(0, MAX_FAILURE_CHARACTERS).toWellFormed() };
}

/** As failureOf; prints the stack trace for the environment's author, too. */
export function reportedFailure(error) {
  const found = failureOf(error);
  const what = error instanceof InvalidResult || error instanceof TurnTimeout ? found.message : (error?.stack ?? error);
  console.error(`rollwire: an environment failed: ${what}`);
  return found;
}

/** Checks what `reset` returned: [observation, info]. */
export function startResponse(reply, maxTurns) {
  if (!Array.isArray(reply) || reply.length !== 2) throw new InvalidResult('reset returned no [observation, info]');
  const [observation, info] = reply;
  return {
    observation: text('the observation', observation),
    instructions: text('info.instructions', info?.instructions ?? ''),
    suffix: text('info.suffix', info?.suffix ?? ''),
    max_turns: turnLimit(maxTurns),
  };
}

/** Checks what `step` returned: [observation, reward, terminated, truncated, info]. */
export function stepResponse(reply) {
  if (!Array.isArray(reply) || reply.length !== 5) {
    throw new InvalidResult('step returned no [observation, reward, terminated, truncated, info]');
  }
  const [observation, reward, terminated, truncated, info] = reply;
  if (typeof terminated !== 'boolean' || typeof truncated !== 'boolean') {
    throw new InvalidResult('terminated and truncated must be true or false');
  }
  return {
    observation: text('the observation', observation),
    reward: finite('the reward', reward),
    terminated,
    truncated,
    suffix: text('info.suffix', info?.suffix ?? ''),
    metrics: checkedMetrics(info?.metrics ?? {}),
  };
}

/** Checks what `renderText` returned. */
export function drawing(reply) {
  return { text: text('the drawing', reply) };
}

/** Returns how metrics are aggregated, in the words of the contract. */
export function aggregations(modes) {
  return Object.fromEntries(
    Object.entries(modes).map(([name, mode]) => {
      if (!METRIC_NAME.test(name)) throw new InvalidResult(`a metric is named ${name}; allowed: ${METRIC_NAME.source}`);
      if (!MODES.includes(mode)) {
        throw new InvalidResult(`metricAggregation holds ${mode} for ${name}; allowed: ${MODES.join(', ')}`);
      }
      return [name, `METRIC_AGGREGATION_${mode.toUpperCase()}`];
    }),
  );
}

/** Returns a valid turn limit. */
export function turnLimit(value) {
  if (!Number.isInteger(value) || value < 1 || value >= 2 ** 32) {
    throw new InvalidResult(`maxTurns is ${value}; allowed: an integer from 1 to ${2 ** 32 - 1}`);
  }
  return value;
}

function checkedMetrics(metrics) {
  const entries = Object.entries(metrics);
  if (entries.length > MAX_METRICS) {
    throw new InvalidResult(`info.metrics has ${entries.length} entries; allowed: at most ${MAX_METRICS}`);
  }
  for (const [name, value] of entries) {
    if (!METRIC_NAME.test(name)) throw new InvalidResult(`a metric is named ${name}; allowed: ${METRIC_NAME.source}`);
    finite(name, value);
  }
  return metrics;
}

function finite(what, value) {
  if (typeof value !== 'number' || !Number.isFinite(value)) {
    throw new InvalidResult(`${what} is ${value}; allowed: a finite number`);
  }
  return value;
}

function text(what, value) {
  if (typeof value !== 'string') throw new InvalidResult(`${what} is of type ${typeof value}; allowed: string`);
  // It would be written as bytes that are no UTF-8, and the server ends the stream of whoever sends such.
  if (!value.isWellFormed()) throw new InvalidResult(`${what} holds half of a surrogate pair; allowed: whole characters`);
  const bytes = Buffer.byteLength(value);
  if (bytes > MIB) throw new InvalidResult(`${what} has ${bytes} bytes; allowed: at most ${MIB}`);
  return value;
}
