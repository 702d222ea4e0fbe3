// The model of model.py in JavaScript, with exit rules (exits.py): words -> states and logits.
//
//     tokens -> embed -> layer -> group -> group -> group -> layer -> norm -> head -> logits
//     a group:  x = noise,  then again and again  x = norm(core(adapter([x ; e])))
//
// Read it from the top to the bottom, but skip the inside of `linear` at first: its tiles of three
// tokens and three rows are there for speed alone.
//
//     R         the record that the page was filled with; R.model is M
//     M         the model: M.C its width, M.D the width of a head, M.window how many tokens
//               attention reads, M.W the weights by their names in model.py, M.shapes their rows
//               and columns, M.x0 the noise of each group, M.layers the blocks that loop in a layer
//     X         states: a row for each token that is computed, in one Float32Array
//     at        the positions of these tokens
//     token     {id, cells, logits}; cells[i] is what layer i keeps of it
//     cell      {e, frames}: what has gone in, and a frame for each loop step that computed it
//     frame     {k, x, keys}: a loop step, the state after it, and [key ; value] of each block,
//               which this step has written. The first frame is the first state, with k = 0
'use strict';
const R = JSON.parse(document.getElementById('record').textContent), M = R.model;

const row = (X, n, C = M.C) => X.subarray(n * C, (n + 1) * C);
const stack = rows => rows.reduce((X, x, n) => (X.set(x, n * x.length), X),
                                  new Float32Array(rows.length * rows[0].length));
const minus = (a, b) => a.map((value, i) => value - b[i]);
const length_of = x => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
const readout = X => linear('wte', norm('ln_f', X));            // the head is the embedding

function add(A, B) {            // into A
  for (let i = 0; i < A.length; i++) A[i] += B[i];
  return A;
}

function log_softmax(x) {
  const top = x.reduce((a, b) => Math.max(a, b), -Infinity);
  const total = top + Math.log(x.reduce((sum, value) => sum + Math.exp(value - top), 0));
  return x.map(value => value - total);
}

// its numbers, which are base64 in the record -----------------------------------------------------

function numbers(base64, half) {
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  return half ? Float32Array.from(new Uint16Array(bytes.buffer), from_float16)
              : new Float32Array(bytes.buffer);
}
function from_float16(bits) {           // all are finite
  const sign = bits >> 15 ? -1 : 1;
  const exponent = bits >> 10 & 31;
  const fraction = (bits & 1023) / 1024;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}

M.turns = {};
M.window ??= Infinity;
M.groups = [...M.layers.keys()].filter(i => M.layers[i].length);
M.W = {};
for (const [name, base64] of Object.entries(M.weights)) M.W[name] = numbers(base64, M.half);
for (const [i, base64] of Object.entries(M.x0)) {
  const X = numbers(base64, false);
  M.x0[i] = Array.from({length: X.length / M.C}, (_, t) => row(X, t));
}

// layers ------------------------------------------------------------------------------------------

// X W^T. Skip the inside at first: a number that is read is used three times
function linear(name, X) {
  const W = M.W[name], [rows, C] = M.shapes[name], n = X.length / C;
  const Y = new Float32Array(n * rows);
  for (let t = 0; t < n; t += 3) {
    const t1 = Math.min(t + 1, n - 1), t2 = Math.min(t + 2, n - 1);     // the last token again
    for (let r = 0; r < rows; r += 3) {
      const r1 = Math.min(r + 1, rows - 1), r2 = Math.min(r + 2, rows - 1);
      let a0 = 0, a1 = 0, a2 = 0, b0 = 0, b1 = 0, b2 = 0, c0 = 0, c1 = 0, c2 = 0;
      for (let i = 0; i < C; i++) {
        const x0 = X[t * C + i], x1 = X[t1 * C + i], x2 = X[t2 * C + i];
        const a = W[r * C + i], b = W[r1 * C + i], c = W[r2 * C + i];
        a0 += a * x0, a1 += a * x1, a2 += a * x2;
        b0 += b * x0, b1 += b * x1, b2 += b * x2;
        c0 += c * x0, c1 += c * x1, c2 += c * x2;
      }
      Y[t * rows + r] = a0, Y[t * rows + r1] = b0, Y[t * rows + r2] = c0;
      Y[t1 * rows + r] = a1, Y[t1 * rows + r1] = b1, Y[t1 * rows + r2] = c1;
      Y[t2 * rows + r] = a2, Y[t2 * rows + r1] = b2, Y[t2 * rows + r2] = c2;
    }
  }
  return Y;
}

function norm(name, X) {        // RMSNorm of each row
  const W = M.W[name], C = W.length, Y = new Float32Array(X.length);
  for (let from = 0; from < X.length; from += C) {
    let squares = 0;
    for (let i = 0; i < C; i++) squares += X[from + i] ** 2;
    const scale = 1 / Math.sqrt(squares / C + 1e-6);
    for (let i = 0; i < C; i++) Y[from + i] = X[from + i] * scale * W[i];
  }
  return Y;
}

// Rotary positions turn adjacent pairs of numbers. Python turns queries and keys, each by its own
// position; here a query alone is turned, by its distance to the key. The products are the same,
// and a key stays valid when words are put in before it
function turned(query, distance) {
  if (!M.rope_base) return query;
  const turn = M.turns[distance] ??= Array.from({length: M.D / 2}, (_, pair) => {
    const angle = distance * M.rope_base ** -(2 * pair / M.D);
    return [Math.cos(angle), Math.sin(angle)];
  });
  const x = new Float32Array(query.length);
  for (let i = 0; i < x.length; i += 2) {
    const [cos, sin] = turn[i % M.D / 2], a = query[i], b = query[i + 1];
    x[i] = a * cos - b * sin;
    x[i + 1] = a * sin + b * cos;
  }
  return x;
}

// Which tokens does a token at position t read? Itself and those before it in the window. A page
// whose model reads others has a `reads` of its own, and with it `readers` and `bias`
let reads = t => Array.from({length: Math.min(M.window, t + 1)}, (_, n) => t - n);
// what is added to the score of a head for the token at position s, which one at t reads
let bias = (name, t, s, head) => 0;

// what a token was at loop step k: its last frame up to there
function frame_at(cell, k) {
  let i = cell.frames.length - 1;
  while (cell.frames[i].k > k) i--;
  return cell.frames[i];
}

// cells: of all tokens in this layer; the keys and values of those in X are written first
function attention(name, X, at, k, cells) {
  const {C, D} = M, QKV = linear(name + '.c_attn', X), Y = new Float32Array(X.length);
  at.forEach((t, n) => cells[t].frames.at(-1).keys[name] = row(QKV, n, 3 * C).slice(C));
  for (const [n, t] of at.entries()) {
    const places = reads(t), query = row(QKV, 3 * n);
    const keys = places.map(s => frame_at(cells[s], k).keys[name]);
    const queries = places.map(s => turned(query, t - s));
    for (let head = 0; head < C; head += D) {
      const log_p = log_softmax(keys.map((key, j) => {
        let score = 0;
        for (let i = head; i < head + D; i++) score += queries[j][i] * key[i];
        return score / Math.sqrt(D) + bias(name, t, places[j], head);
      }));
      for (const [j, key] of keys.entries()) {
        const p = Math.exp(log_p[j]);
        for (let i = head; i < head + D; i++) Y[n * C + i] += p * key[C + i];
      }
    }
  }
  return linear(name + '.c_proj', Y);
}

function block(name, X, at, k, cells) {         // attention and MLP, each between two norms
  X = norm(name + '.n2', add(X, attention(name + '.attn', norm(name + '.n1', X), at, k, cells)));
  const hidden = linear(name + '.mlp.c_fc', norm(name + '.n3', X));
  for (let i = 0; i < hidden.length; i++) hidden[i] /= 1 + Math.exp(-hidden[i]);        // SiLU
  return norm(name + '.n4', add(X, linear(name + '.mlp.c_proj', hidden)));
}

// exit rules: {signal, tau, hits, keep} -----------------------------------------------------------
//
// The signals of exits.py: (x0, x1, memo) -> [value, what the next call gets as its memo]. The
// value of an acceleration is undefined in a token's first step

const EPS = 1e-8;
const SIGNALS = {
  norm: (x0, x1) => [length_of(minus(x1, x0))],
  norm_rel: (x0, x1) => [length_of(minus(x1, x0)) / (length_of(x0) + EPS)],
  kl(x0, x1, memo) {
    const before = memo ?? log_softmax(readout(x0)), now = log_softmax(readout(x1));
    return [Math.max(0, now.reduce((sum, p, i) => sum + Math.exp(p) * (p - before[i]), 0)), now];
  },
  accel: (x0, x1, memo) => acceleration(x0, x1, memo, () => 1),
  accel_hat: (x0, x1, memo) =>
    acceleration(x0, x1, memo, delta => length_of(delta) + length_of(memo) + EPS),
  accel_rel: (x0, x1, memo) => acceleration(x0, x1, memo, () => length_of(x0) + EPS),
  confidence: (x0, x1) => [1 - Math.exp(Math.max(...log_softmax(readout(x1))))],
};

function acceleration(x0, x1, memo, divisor) {          // memo: the update before this one
  const delta = minus(x1, x0);
  return [memo && length_of(minus(delta, memo)) / divisor(delta), delta];
}

// who reads a token for which `has` is true: itself and the window - 1 tokens after it. Of all
// these, the positions from `from` on and before `end`
let readers = (has, from, end) => {
  const positions = [];
  let last = -Infinity;
  for (let t = Math.max(0, from - M.window + 1); t < end; t++) {
    if (has(t)) last = t;
    if (t >= from && t - last < M.window) positions.push(t);
  }
  return positions;
};

// a pass ------------------------------------------------------------------------------------------
//
//     how       {rule, loops, wake, one_by_one}: the exit rule; the budget of loop steps; do tokens
//               sleep until news arrives, or exit for good?; does each token begin when those
//               before it are done (the cache policy `latest`)?
//     from      the tokens before this position have been read; later ones may have cells of an
//               earlier pass, which are then repaired
//     awake     the positions of the tokens that a step computes

// Layers that loop. A token *moves* in a step unless its signal has been small `hits` times in a
// row. It is awake in the next step if it has moved, or if a token that it reads has; otherwise it
// sleeps, and its state, keys and streak stay as they are
function* group(i, cells, awake, from, {rule, loops, wake, one_by_one}) {
  const signal = SIGNALS[rule.signal];
  const start = one_by_one && from ? cells[from - 1].frames.at(-1).k : 0;       // the clock runs on
  const moved_at = k => t => {
    const frame = frame_at(cells[t], k);
    return frame.k === k && frame.moved;
  };
  const earlier_pass_has = k => cells.some(cell => cell.frames.at(-1).k >= k);
  for (let k = start + 1; k <= start + loops; k++) {
    if (awake.length) yield* loop_step(i, cells, awake, k);
    else if (!earlier_pass_has(k)) break;

    // who moves, and so who is awake in the next step
    for (const t of awake) {
      const cell = cells[t], frame = cell.frames.at(-1);
      [frame.signal, cell.memo] = signal(frame.before, frame.x, cell.memo);
      cell.streak = frame.signal < rule.tau ? cell.streak + 1 : 0;      // undefined is not small
      frame.moved = cell.streak < rule.hits;
    }
    const next = wake ? readers(moved_at(k), from, cells.length) : awake.filter(moved_at(k));
    const stays = new Set(next);

    // Who falls asleep: Algorithm 1 (keep = false) throws the step away. The update of a token that
    // sleeps is zero, and that is what its signal remembers when it wakes
    for (const t of awake.filter(t => !stays.has(t))) {
      const cell = cells[t], frame = cell.frames.at(-1);
      if (!rule.keep) Object.assign(frame, {x: frame.before, thrown: true});
      cell.memo = signal(frame.x, frame.x, cell.memo)[1];
    }
    awake = next;
    yield awake;
  }
}

// the block map of the layers in group i, for the tokens that are awake: each gets a frame
function* loop_step(i, cells, awake, k) {
  const before = awake.map(t => cells[t].frames.at(-1).x);
  awake.forEach((t, n) => cells[t].frames.push({k, before: before[n], keys: {}}));
  const old = stack(before), from_x = linear(`h.${i}.adapter.x`, old);
  let X = add(from_x, stack(awake.map(t => cells[t].from_e)));
  for (const name of M.layers[i]) {
    X = block(name, X, awake, k, cells);
    yield;
  }
  X = norm(`h.${i}.norm`, X);
  if (M.damping) X = X.map((x, j) => x + M.damping * (old[j] - x));
  awake.forEach((t, n) => {
    const frame = cells[t].frames.at(-1);
    frame.x = row(X, n);
    [frame.change] = SIGNALS.norm_rel(frame.before, frame.x);
  });
}

// A layer: inputs -> outputs, a row for each token from `from` on. It computes those that are new,
// those whose input is not what it was or that still moved when the budget ended, and those who
// read them
function* layer(i, tokens, from, inputs, how) {
  const loops = M.layers[i].length > 0;
  const is_new = t => t >= from && (!tokens[t].cells[i] || tokens[t].seam ||
    tokens[t].cells[i].moving ||
    inputs[t - from].some((value, c) => value !== tokens[t].cells[i].e[c]));
  const at = readers(is_new, from, tokens.length);
  if (at.length) {
    const E = stack(at.map(t => inputs[t - from]));
    const from_e = loops ? linear(`h.${i}.adapter.e`, E) : E;
    for (const [n, t] of at.entries()) {
      const x0 = loops ? M.x0[i][t] : null;
      const cell = tokens[t].cells[i] ??= {frames: [{k: 0, x: x0, keys: {}}]};
      const e = inputs[t - from];       // not that row of E, into which a block adds
      Object.assign(cell, {e, from_e: row(from_e, n), streak: 0, memo: undefined, moving: false});
    }
    const cells = tokens.map(token => token.cells[i]);
    if (loops) yield* group(i, cells, at, from, how);
    else {
      const X = block(`h.${i}`, E, at, 0, cells);
      at.forEach((t, n) => cells[t].frames[0].x = row(X, n));
    }
  }
  return tokens.slice(from).map(token => token.cells[i].frames.at(-1).x);
}

// Read the tokens from `from` on: their cells and logits are filled in. Where this generator
// yields, the page can do something else
function* read(tokens, from, how) {
  if (how.one_by_one && tokens.length - from > 1) {
    for (let t = from; t < tokens.length; t++) yield* read(tokens.slice(0, t + 1), t, how);
    return;
  }
  if (from === tokens.length) return;
  let X = tokens.slice(from).map(embed_at(from));
  for (const i of M.layers.keys()) {
    X = yield* layer(i, tokens, from, X, how);
    yield;
  }
  const logits = readout(stack(X)), V = logits.length / X.length;
  X.forEach((_, n) => tokens[from + n].logits = row(logits, n, V));
}

const embed_at = from => ({id}, n) => {
  const x = row(M.W.wte, id), place = M.W.wpe ? row(M.W.wpe, from + n) : x.map(() => 0);
  return x.map((value, i) => (value + place[i]) * Math.sqrt(M.C));
};

// an edit -----------------------------------------------------------------------------------------

// The tokens of a text that has been edited, and where to read from. Those before the first change
// stay as they are. With `repair`, those after the last change stay too, and every token starts
// from its last state, so that only those wake that depend on the change
function edited(before, ids, repair) {
  const shorter = Math.min(before.length, ids.length), longer = ids.length - before.length;
  let from = 0, same = 0;
  while (from < shorter && ids[from] === before[from].id) from++;
  if (from === shorter && !longer) return {tokens: before, from};
  while (repair && same < shorter - from && ids.at(-1 - same) === before.at(-1 - same).id) same++;
  const tokens = ids.map((id, t) => {
    const old = t < from ? before[t] : t >= ids.length - same ? before[t - longer] : null;
    return !old ? {id, cells: []} : repair ? {...old, cells: old.cells.map(at_rest)} : old;
  });
  if (same) tokens[ids.length - same].seam = true;      // it follows other tokens than before
  return {tokens, from};
}

// a cell whose last state is its first
function at_rest(cell) {
  const {x, keys, moved} = cell.frames.at(-1);
  return {...cell, moving: moved, frames: [{k: 0, x, keys: {...keys}, kept: true}]};
}

// what tokens answer from their states after loop step k of layer i -------------------------------

// Logits of all tokens, or of the one at position `only`. The states of the last group go through
// the layers after it (geometry.logits_of); of other tokens, only those that are read are needed
function lens(tokens, i, k, only) {
  const coda = i < M.groups.at(-1) ? [] : [...M.layers.keys()].slice(i + 1).map(j => `h.${j}`);
  const start = only === undefined ? 0 : Math.max(0, only - (M.window - 1) * coda.length);
  const read = tokens.slice(start, only === undefined ? tokens.length : only + 1);
  const cells = read.map(() => ({frames: [{k: 0, keys: {}}]})), at = [...read.keys()];
  let X = stack(read.map(token => frame_at(token.cells[i], k).x));
  for (const name of coda) X = block(name, X, at, k, cells);
  const logits = readout(only === undefined ? X : row(X, read.length - 1));
  const V = logits.length / (only === undefined ? read.length : 1);
  return Array.from({length: logits.length / V}, (_, n) => row(logits, n, V));
}
