// FrozenLake, the same game as the server's own: cross the ice to the goal. The map of a seed is another one, because the
// random numbers are another generator's.

const ACTIONS = ['left', 'down', 'right', 'up'];
const MOVES = [[0, -1], [1, 0], [0, 1], [-1, 0]];
const PLAYER_ON = { _: 'P', O: 'X', G: '√' };
const SPECIAL_TOKENS = ['<|im_start|>', '<|im_end|>'];
const INSTRUCTIONS =
  'You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the unintended ' +
  'direction due to the slippery ice. The answer must be one of action in a turn, format is <answer>Right</answer>\n' +
  'The meaning of each symbol in the state is:\n' +
  'P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal\n' +
  'Your available actions are:\n' +
  'Left, Down, Right, Up';

/** SplitMix64: numbers in [0, 1) that follow from a 64-bit seed. */
function generator(seed) {
  let state = BigInt.asUintN(64, seed);
  return () => {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
    let z = state;
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) / 2 ** 53;
  };
}

export class FrozenLake {
  static summary = 'A lake crossed in turns; JavaScript.';

  static defaultOptions = { size: 4, p: 0.8, is_slippery: false, max_steps: 10, format_penalty: -0.01 };

  static metricAggregation = {
    action_is_effective: 'mean',
    action_is_valid: 'mean',
    success: 'last',
    format_penalty: 'mean',
  };

  constructor(options = {}) {
    for (const name of Object.keys(options)) {
      if (!(name in FrozenLake.defaultOptions)) {
        throw new RangeError(`option ${name}; allowed: ${Object.keys(FrozenLake.defaultOptions).join(', ')}`);
      }
      const expected = typeof FrozenLake.defaultOptions[name];
      if (typeof options[name] !== expected) throw new RangeError(`option ${name} is no ${expected}`);
    }
    const settings = { ...FrozenLake.defaultOptions, ...options };
    const { size, p, max_steps: maxTurns } = settings;
    if (!Number.isInteger(size) || size < 2 || size > 64) throw new RangeError(`size is ${size}; allowed: 2 to 64`);
    if (!(p > 0 && p <= 1)) throw new RangeError(`p is ${p}; allowed: above 0, at most 1`);
    if (!Number.isInteger(maxTurns) || maxTurns < 1) throw new RangeError(`max_steps is ${maxTurns}; allowed: 1 or more`);
    Object.assign(this, { size, p, maxTurns, slippery: settings.is_slippery, formatPenalty: settings.format_penalty });
  }

  reset(seed) {
    this.random = generator(seed);
    do this.draw();
    while (!this.reachable());
    this.turn = 0;
    return [this.renderText(), { instructions: INSTRUCTIONS }];
  }

  step(response) {
    this.turn += 1;
    const direction = parse(response);
    const before = this.player;
    if (direction >= 0) this.player = this.destination(direction);
    const symbol = this.cells[this.player];
    const success = symbol === 'G';
    const terminated = success || symbol === 'O';
    const penalty = direction < 0 ? this.formatPenalty : 0;
    const metrics = {
      action_is_effective: Number(this.player !== before),
      action_is_valid: Number(direction >= 0),
      success: Number(success),
      format_penalty: penalty,
    };
    const truncated = !terminated && this.turn >= this.maxTurns;
    return [this.renderText(), Number(success) + penalty, terminated, truncated, { metrics }];
  }

  /** The lake as the policy sees it: rows from the top, one symbol per cell. */
  renderText() {
    const shown = this.cells.map((symbol, place) => (place === this.player ? PLAYER_ON[symbol] : symbol));
    const rows = Array.from({ length: this.size }, (_, row) => shown.slice(row * this.size, (row + 1) * this.size));
    return rows.map((row) => row.join('')).join('\n');
  }

  draw() {
    const count = this.size ** 2;
    this.cells = Array.from({ length: count }, () => (this.random() < this.p ? '_' : 'O'));
    this.player = Math.floor(this.random() * count);
    const goal = (this.player + 1 + Math.floor(this.random() * (count - 1))) % count;
    this.cells[this.player] = '_';
    this.cells[goal] = 'G';
  }

  reachable() {
    const seen = new Set([this.player]);
    for (const cell of seen) {
      if (this.cells[cell] === 'G') return true;
      for (let direction = 0; direction < 4; direction += 1) {
        const next = this.neighbour(cell, direction);
        if (this.cells[next] !== 'O') seen.add(next);
      }
    }
    return false;
  }

  destination(direction) {
    // On slippery ice a third of the moves goes to each side.
    const slip = this.slippery ? Math.floor(this.random() * 3) - 1 : 0;
    return this.neighbour(this.player, (direction + slip + 4) % 4);
  }

  neighbour(cell, direction) {
    const row = Math.floor(cell / this.size) + MOVES[direction][0];
    const column = (cell % this.size) + MOVES[direction][1];
    const inside = row >= 0 && row < this.size && column >= 0 && column < this.size;
    return inside ? row * this.size + column : cell;
  }
}

/** Returns the direction that a response names, or -1 when it names none. */
function parse(response) {
  let text = response;
  for (const token of SPECIAL_TOKENS) text = text.replaceAll(token, '');
  const start = text.indexOf('<answer>');
  const end = start < 0 ? -1 : text.indexOf('</answer>', start);
  return end < 0 ? -1 : ACTIONS.indexOf(text.slice(start + '<answer>'.length, end).trim().toLowerCase());
}
