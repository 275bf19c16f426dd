// The sessions of a provider. Opening is idempotent by request id and a turn by its number, so that a call that comes
// again after a cut is answered as before.

import { randomBytes } from 'node:crypto';
import grpc from '@grpc/grpc-js';
import { durationMs, fromStruct } from './contract.js';
import { TurnTimeout, drawing, failureOf, reportedFailure, startResponse, stepResponse } from './results.js';

const { status } = grpc;

/** A call that is refused; becomes CallError. */
class Refusal extends Error {
  constructor(code, reason, message, retryAfterSeconds) {
    super(message);
    this.reply = { code, reason, message };
    if (retryAfterSeconds !== undefined) this.reply.retry_after = { seconds: retryAfterSeconds, nanos: 0 };
  }
}

export class Sessions {
  /**
   * @param {Record<string, (options: object) => object>} factories Environments by tag.
   * @param {number} capacity Sessions at once.
   */
  constructor(factories, capacity) {
    this.factories = factories;
    this.capacity = capacity;
    this.byId = new Map();
    this.openings = new Map(); // request id to the promise of its answer; of failed ones the latest `capacity`
    this.opening = new Set(); // request ids of sessions that are being opened
    this.handlers = {
      open: (request, timeoutMs) => this.open(request, timeoutMs),
      step: (request, timeoutMs) => this.step(request, timeoutMs),
      render: (request, timeoutMs) => this.render(request, timeoutMs),
      renew: (request) => this.renew(request),
      close: (request) => this.close(request),
    };
  }

  get ids() {
    return [...this.byId.keys()];
  }

  /** Whether no session is open or being opened. */
  get empty() {
    return this.byId.size + this.opening.size === 0;
  }

  /** Answers one SessionCall with a SessionReply; what goes wrong is in the reply. */
  async answer(call) {
    const handler = this.handlers[call.call];
    try {
      if (!handler) throw new Refusal(status.INVALID_ARGUMENT, 'INVALID_FIELD', 'call is of no kind that is known');
      return { call_id: call.call_id, [call.call]: await handler(call[call.call], durationMs(call.timeout)) };
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      return { call_id: call.call_id, error: error.reply };
    }
  }

  /** Ends all sessions. */
  closeAll() {
    for (const id of this.ids) this.close({ session_id: id });
  }

  open(request, timeoutMs) {
    const known = this.openings.get(request.request_id);
    if (known) return known;
    const factory = Object.hasOwn(this.factories, request.environment_tag) && this.factories[request.environment_tag];
    if (!factory) {
      throw new Refusal(status.NOT_FOUND, 'UNKNOWN_ENVIRONMENT', `${request.environment_tag} is not served here`);
    }
    if (this.byId.size + this.opening.size >= this.capacity) {
      const message = `all ${this.capacity} sessions of this provider are in use`;
      throw new Refusal(status.RESOURCE_EXHAUSTED, 'SESSIONS_EXHAUSTED', message, 1);
    }
    this.opening.add(request.request_id);
    const answer = this.start(factory, request, timeoutMs).finally(() => this.opening.delete(request.request_id));
    this.openings.set(request.request_id, answer);
    if (this.openings.size > 2 * this.capacity) this.forgetFailedOpenings();
    return answer;
  }

  async start(factory, request, timeoutMs) {
    const options = fromStruct(request.options);
    let environment;
    try {
      environment = factory(options);
    } catch (error) {
      if (Object.keys(options).length === 0) return { failure: reportedFailure(error) };
      const message = `the environment refuses the options: ${failureOf(error).message}`;
      throw new Refusal(status.INVALID_ARGUMENT, 'INVALID_FIELD', message);
    }
    const reset = attempt(() => environment.reset(BigInt(request.seed)));
    try {
      const reply = await within(timeoutMs, reset);
      const response = startResponse(reply, environment.maxTurns);
      const id = randomBytes(16).toString('hex');
      const maxTurns = response.max_turns;
      const idle = Promise.resolve(); // settles when nothing runs in the environment
      const requestId = request.request_id;
      this.byId.set(id, { environment, requestId, turns: 0, maxTurns, ended: false, last: null, idle });
      return { ...response, session_id: id };
    } catch (error) {
      reset.catch(() => {}).then(() => closeEnvironment(environment));
      return { failure: reportedFailure(error) };
    }
  }

  /** Runs work on an environment after what runs in it now. */
  use(session, timeoutMs, work) {
    const done = session.idle.then(work);
    session.idle = done.catch(() => {});
    return within(timeoutMs, done);
  }

  step(request, timeoutMs) {
    const session = this.find(request.session_id);
    const { turn } = request;
    if (session.last && turn === session.turns - 1) return session.last;
    if (turn !== session.turns || session.playing) {
      const message = `turn is ${turn}; allowed: ${session.turns}`;
      throw new Refusal(status.FAILED_PRECONDITION, 'WRONG_TURN', message);
    }
    if (session.ended) throw new Refusal(status.FAILED_PRECONDITION, 'EPISODE_ENDED', 'the episode has ended');
    session.turns += 1;
    session.playing = true;
    session.last = this.play(session, request.action, timeoutMs).finally(() => (session.playing = false));
    return session.last;
  }

  async play(session, action, timeoutMs) {
    try {
      const response = stepResponse(await this.use(session, timeoutMs, () => session.environment.step(action)));
      if (session.turns >= session.maxTurns && !response.terminated) response.truncated = true;
      session.ended = response.terminated || response.truncated;
      return response;
    } catch (error) {
      session.ended = true;
      return { failure: reportedFailure(error) };
    }
  }

  async render(request, timeoutMs) {
    const session = this.find(request.session_id);
    const { environment } = session;
    if (request.format !== 'RENDER_FORMAT_TEXT' || !environment.renderText) {
      throw new Refusal(status.FAILED_PRECONDITION, 'RENDER_UNSUPPORTED', `it cannot draw ${request.format}`);
    }
    try {
      return drawing(await this.use(session, timeoutMs, () => environment.renderText()));
    } catch (error) {
      throw new Refusal(status.FAILED_PRECONDITION, 'RENDER_UNSUPPORTED', reportedFailure(error).message);
    }
  }

  renew(request) {
    this.find(request.session_id);
    return request.lease ? { lease: request.lease } : {};
  }

  close(request) {
    const session = this.byId.get(request.session_id);
    if (session) {
      this.byId.delete(request.session_id);
      this.openings.delete(session.requestId);
      session.idle.then(() => closeEnvironment(session.environment));
    }
    return {};
  }

  find(id) {
    const session = this.byId.get(id);
    if (!session) throw new Refusal(status.NOT_FOUND, 'UNKNOWN_SESSION', 'no such session: it was closed');
    return session;
  }

  forgetFailedOpenings() {
    const live = new Set([...this.opening, ...[...this.byId.values()].map((session) => session.requestId)]);
    for (const id of [...this.openings.keys()].slice(0, -this.capacity)) if (!live.has(id)) this.openings.delete(id);
  }
}

/** Lets an environment free what it holds; what goes wrong is printed. */
export function closeEnvironment(environment) {
  attempt(() => environment.close?.()).catch((error) => {
    console.error(`rollwire: an environment failed to close: ${error?.stack ?? error}`);
  });
}

/** Runs work; what it throws becomes a rejection. */
function attempt(work) {
  return new Promise((resolve) => resolve(work()));
}

/** Awaits work for a limited time; work that blocks the event loop cannot be cut short. */
async function within(timeoutMs, work) {
  let timer;
  const timeout = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TurnTimeout(`no answer within ${timeoutMs / 1000} s`)), timeoutMs);
  });
  try {
    return await Promise.race([work, timeout]);
  } finally {
    clearTimeout(timer);
  }
}
