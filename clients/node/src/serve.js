// serveEnvironment: attaches to an environment server, answers its calls, and attaches again after a cut.

import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import grpc from '@grpc/grpc-js';
import { CHANNEL_OPTIONS, EnvironmentService, MAX_MESSAGE_BYTES, TAG, durationMs, messageBytes, toStruct } from './contract.js';
import { Sessions, closeEnvironment } from './sessions.js';
import { aggregations, turnLimit } from './results.js';

const { status } = grpc;
const TRANSIENT = new Set([
  status.UNAVAILABLE,
  status.DEADLINE_EXCEEDED,
  status.RESOURCE_EXHAUSTED,
  status.CANCELLED,
  status.UNKNOWN,
  status.INTERNAL,
]);
const WELCOME_TIMEOUT_MS = 20_000;
const END_TIMEOUT_MS = 10_000;
const FIRST_DELAY_MS = 200;
const LONGEST_DELAY_MS = 5_000;

/**
 * Serves environments until SIGTERM, Ctrl-C or `signal`: running sessions end first, a second signal ends the process.
 *
 * @param {string} target `host:port` of an environment server.
 * @param {Record<string, (options: object) => object>} factories Tag to a function that makes an environment, with
 *   `maxTurns`, `reset(seed: bigint) -> [observation, info]`,
 *   `step(action: string) -> [observation, reward, terminated, truncated, info]`, both possibly async, and optionally
 *   `renderText()` and `close()`. Its class may have `summary`, `defaultOptions` and `metricAggregation`
 *   (name to `mean`, `sum`, `last`, `first`, `max` or `min`). It throws when it does not like its options.
 * @param {{capacity?: number, giveUpAfterSeconds?: number, drainTimeoutSeconds?: number, signal?: AbortSignal}} settings
 * @returns {Promise<void>} Rejects with one line when the server refuses a tag or cannot be reached for too long.
 */
export async function serveEnvironment(target, factories, settings = {}) {
  const { capacity = 64, giveUpAfterSeconds = 300, drainTimeoutSeconds = 30, signal } = settings;
  const descriptions = Object.entries(factories).map(([tag, factory]) => describe(tag, factory));
  const sessions = new Sessions(factories, capacity);
  const provider = new Provider(target, descriptions, sessions, { capacity, giveUpAfterSeconds, drainTimeoutSeconds });
  const release = onStop(signal, () => provider.drain());
  try {
    await provider.run();
  } finally {
    release();
    sessions.closeAll();
  }
}

class Provider {
  constructor(target, descriptions, sessions, settings) {
    Object.assign(this, { target, descriptions, sessions, settings });
    this.id = randomBytes(16).toString('hex');
    this.stopping = new AbortController();
    this.connectedAt = Date.now();
    this.leaseMs = Infinity;
    this.answering = 0;
    this.drainIsOver = false;
  }

  /** Takes no new sessions, waits for the running ones, then ends. */
  drain() {
    this.stopping.abort();
    this.outbox?.send({ drain: {} });
    setTimeout(() => {
      this.drainIsOver = true;
      this.endIfQuiet();
    }, this.settings.drainTimeoutSeconds * 1000).unref();
    this.endIfQuiet();
  }

  async run() {
    const client = new EnvironmentService(this.target, grpc.credentials.createInsecure(), CHANNEL_OPTIONS);
    let delay = FIRST_DELAY_MS;
    try {
      while (!this.stopping.signal.aborted) {
        const before = this.connectedAt;
        const error = await this.attach(client);
        if (this.stopping.signal.aborted) return;
        if (error.code === status.UNIMPLEMENTED) error.details = 'it takes no providers';
        if (!TRANSIENT.has(error.code)) throw new Error(`the server at ${this.target} refuses: ${error.details}`);
        delay = this.connectedAt > before ? FIRST_DELAY_MS : Math.min(2 * delay, LONGEST_DELAY_MS);
        this.checkBudget(error.details, delay);
        await sleep(delay * (0.5 + Math.random() / 2), null, { signal: this.stopping.signal }).catch(() => {});
      }
    } finally {
      client.close();
    }
  }

  checkBudget(cause, delay) {
    const awayMs = Date.now() - this.connectedAt;
    if (awayMs > this.settings.giveUpAfterSeconds * 1000) {
      throw new Error(
        `no environment server takes this provider at ${this.target} (${cause}); ` +
          `tried for ${this.settings.giveUpAfterSeconds} s`,
      );
    }
    if (awayMs > this.leaseMs) this.sessions.closeAll(); // the server has given them up
    console.error(`rollwire: not attached to ${this.target} (${cause}); trying again in ${(delay / 1000).toFixed(1)} s`);
  }

  /** One stream from hello to end; resolves to the status that ended it. */
  attach(client) {
    return new Promise((resolve) => {
      const call = client.Attach();
      const outbox = new Outbox(call);
      const late = setTimeout(() => call.cancel(), WELCOME_TIMEOUT_MS);
      const ended = (found) => {
        clearTimeout(late);
        outbox.closed = true;
        if (this.outbox === outbox) {
          this.outbox = null;
          this.connectedAt = Date.now();
        }
        resolve(found);
      };
      call.on('error', ended);
      call.on('status', (found) => ended({ code: found.code || status.UNAVAILABLE, details: found.details || 'the stream ended' }));
      call.on('data', (message) => {
        if (message.welcome) {
          clearTimeout(late);
          this.outbox = outbox;
          this.connectedAt = Date.now();
          this.leaseMs = durationMs(message.welcome.lease);
          console.error(`rollwire: attached to ${this.target}`);
          if (this.stopping.signal.aborted) {
            outbox.send({ drain: {} }); // it was asked to stop while it attached
            this.endIfQuiet();
          }
        } else if (message.calls) {
          for (const one of message.calls.calls) this.answer(one, outbox);
        }
      });
      outbox.send({ hello: this.hello() });
    });
  }

  hello() {
    return {
      provider_id: this.id,
      environments: this.descriptions,
      capacity: this.settings.capacity,
      session_ids: this.sessions.ids,
      program: `node ${process.version}`,
    };
  }

  async answer(call, outbox) {
    this.answering += 1;
    let reply = await this.sessions.answer(call);
    this.answering -= 1;
    const bytes = messageBytes({ replies: { replies: [reply] } });
    if (bytes > MAX_MESSAGE_BYTES) reply = tooLarge(reply, bytes);
    outbox.reply(reply);
    this.endIfQuiet();
  }

  endIfQuiet() {
    const quiet = this.answering === 0 && this.sessions.empty;
    if (this.stopping.signal.aborted && (quiet || this.drainIsOver)) this.outbox?.end();
  }
}

/** Replies that are ready in the same turn of the event loop share a message. */
class Outbox {
  constructor(call) {
    this.call = call;
    this.replies = [];
    this.closed = false;
  }

  send(message) {
    if (!this.closed) this.call.write(message);
  }

  reply(reply) {
    this.replies.push(reply);
    if (this.replies.length === 1) setImmediate(() => this.flush());
  }

  flush() {
    let batch = [];
    let size = 0;
    for (const reply of this.replies.splice(0)) {
      const bytes = messageBytes({ replies: { replies: [reply] } });
      if (batch.length && size + bytes > MAX_MESSAGE_BYTES / 4) {
        this.send({ replies: { replies: batch } });
        [batch, size] = [[], 0];
      }
      batch.push(reply);
      size += bytes;
    }
    if (batch.length) this.send({ replies: { replies: batch } });
  }

  end() {
    setImmediate(() => {
      this.flush();
      if (this.closed) return;
      this.call.end();
      setTimeout(() => this.call.cancel(), END_TIMEOUT_MS).unref();
    });
  }
}

function tooLarge(reply, bytes) {
  const failure = {
    kind: 'ENVIRONMENT_FAILURE_KIND_INVALID_RESULT',
    type: 'InvalidResult',
    message: `the reply has ${bytes} bytes; a message has at most ${MAX_MESSAGE_BYTES}`,
  };
  return { call_id: reply.call_id, [reply.open ? 'open' : 'step']: { failure } };
}

/** Makes one environment to try it, and describes it. */
function describe(tag, factory) {
  if (!TAG.test(tag) || tag.includes('..')) {
    const rule = "1 to 63 letters, digits, '_', '.' and '-', first a letter or digit, without '..'";
    throw new Error(`the tag is ${tag}; allowed: ${rule}`);
  }
  if (typeof factory !== 'function') throw new Error(`environment ${tag} is no function that makes an environment`);
  const sample = factory({});
  for (const method of ['reset', 'step']) {
    if (typeof sample[method] !== 'function') throw new Error(`environment ${tag} has no method ${method}`);
  }
  const { summary = '', defaultOptions = {}, metricAggregation = {} } = sample.constructor;
  closeEnvironment(sample);
  return {
    tag,
    summary,
    max_turns: turnLimit(sample.maxTurns),
    default_options: toStruct(defaultOptions),
    render_formats: sample.renderText ? ['RENDER_FORMAT_TEXT'] : [],
    metric_aggregation: aggregations(metricAggregation),
  };
}

/** Calls `stop` at the first signal; the second ends the process. Returns what takes the handlers away. */
function onStop(signal, stop) {
  let asked = false;
  const handler = () => {
    if (asked) process.exit(130);
    asked = true;
    stop();
  };
  for (const name of ['SIGTERM', 'SIGINT']) process.on(name, handler);
  signal?.addEventListener('abort', stop, { once: true });
  if (signal?.aborted) stop();
  return () => {
    for (const name of ['SIGTERM', 'SIGINT']) process.off(name, handler);
    signal?.removeEventListener('abort', stop);
  };
}
