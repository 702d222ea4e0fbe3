// The model of model.py in JavaScript: tokens -> the states after every loop step, and logits.
//
//     tokens -> embed -> block -> group -> group -> group -> block -> norm -> head -> logits
//     a group:  x = noise,  then again and again  x = norm(core(adapter([x ; e])))
//
// A pass reads new tokens side by side. `memory` keeps the keys and values of every loop step for
// later passes (cache.py, `exact`). M is the model: M.C its width, M.D that of a head, M.W its
// weights by their names in model.py, M.shapes their rows and columns.
//
//     X, E      states, and what enters a group: a row for each token, in one Float32Array
//     at, k     the positions of the tokens of a pass, without gaps; the loop step, from 1
//     how       {n_loop, rule}: loops of each group at most; an exit rule {exits}, or null
'use strict';

const row = (X, i, C = M.C) => X.subarray(i * C, (i + 1) * C);
const add = (A, B) => { for (let i = 0; i < A.length; i++) A[i] += B[i]; return A; };  // into A
const table = (memory, name, k, C) => memory[`${name}/${k}`] ??= new Float32Array(M.block_size * C);
const stack = rows => rows.reduce((X, x, n) => (X.set(x, n * x.length), X),
                                  new Float32Array(rows.length * rows[0].length));
const readout = X => linear('wte', norm('ln_f', X));            // the head is the embedding

function log_softmax(x) {
  const top = x.reduce((a, b) => Math.max(a, b), -Infinity);
  const total = top + Math.log(x.reduce((sum, value) => sum + Math.exp(value - top), 0));
  return x.map(value => value - total);
}

// X W^T in tiles of three tokens and three rows of W: a number that is read is used three times
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

function rotary(x, t) {         // turns adjacent pairs of numbers, in place
  for (let i = 0; i < x.length; i += 2) {
    const angle = t * M.rope_base ** -(i % M.D / M.D), cos = Math.cos(angle), sin = Math.sin(angle);
    [x[i], x[i + 1]] = [x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos];
  }
}

function attention(name, X, at, kv) {           // kv: [key ; value] of each position
  const {C, D} = M, QKV = linear(name + '.c_attn', X), Y = new Float32Array(X.length);
  for (let n = 0; n < at.length; n++) {
    const t = at[n], q = 3 * n * C, scores = new Float32Array(t + 1);
    if (M.rope_base) for (const of of [0, 1]) rotary(row(QKV, 3 * n + of), t);
    row(kv, t, 2 * C).set(row(QKV, n, 3 * C).subarray(C));
    for (let head = 0; head < C; head += D) {
      for (let s = 0; s <= t; s++) {
        let score = 0;
        for (let i = head, key = 2 * s * C; i < head + D; i++) score += QKV[q + i] * kv[key + i];
        scores[s] = score / Math.sqrt(D);
      }
      const log_p = log_softmax(scores);
      for (let s = 0; s <= t; s++) {
        const p = Math.exp(log_p[s]), value = (2 * s + 1) * C;
        for (let i = head; i < head + D; i++) Y[n * C + i] += p * kv[value + i];
      }
    }
  }
  return linear(name + '.c_proj', Y);
}

function block(name, X, at, k, memory) {        // attention and MLP, each between two norms
  const kv = table(memory, name, k, 2 * M.C);
  X = norm(name + '.n2', add(X, attention(name + '.attn', norm(name + '.n1', X), at, kv)));
  const hidden = linear(name + '.mlp.c_fc', norm(name + '.n3', X));
  for (let i = 0; i < hidden.length; i++) hidden[i] /= 1 + Math.exp(-hidden[i]);        // SiLU
  return norm(name + '.n4', add(X, linear(name + '.mlp.c_proj', hidden)));
}

// layers that loop -> each token's states x^(0), x^(1), ... and how many loop steps it keeps
function* group(g, name, blocks, E, at, memory, {n_loop, rule}) {
  const from_e = linear(name + '.adapter.e', E), C = 2 * M.C, from = C * at[0];
  const tokens = at.map((t, n) => ({t, e: row(from_e, n), states: [row(M.x0[g], t)]}));
  for (let k = 1, looping = tokens; k <= n_loop; k++) {
    // who has exited keeps the keys and values of its last step, and nobody waits for it
    const signals = table(memory, name, k, 1).fill(-Infinity, at[0]);
    for (const one of k > 1 ? blocks : [])
      table(memory, one, k, C).set(table(memory, one, k - 1, C).subarray(from), from);
    if (!looping.length) continue;

    // the block map for the others
    let X = linear(name + '.adapter.x', stack(looping.map(token => token.states.at(-1))));
    X = add(X, stack(looping.map(token => token.e)));
    for (const one of blocks) {
      X = block(one, X, looping.map(token => token.t), k, memory);
      yield;
    }
    X = norm(name + '.norm', X);
    looping.forEach((token, n) => token.states.push(row(X, n)));
    looping = looping.filter(token => !rule?.exits(token, signals));
  }
  return tokens.map(({states}) => ({states, steps: states.length - 1}));
}

// reads ids[from], ids[from + 1], ... -> for each token {groups, logits}: what the groups found,
// and the logits of the next token. Where this generator yields, the page can do something else
function* read(ids, from, memory, how) {
  const at = [...ids.keys()].slice(from), groups = [];
  let X = stack(at.map(t => row(M.W.wte, ids[t])));
  if (!M.rope_base) X = add(X, stack(at.map(t => row(M.W.wpe, t))));
  X = X.map(value => value * Math.sqrt(M.C));
  for (const [i, blocks] of M.layers.entries()) {       // blocks: the names of those that loop here
    if (blocks.length) {
      groups.push(yield* group(groups.length, `h.${i}`, blocks, X, at, memory, how));
      X = stack(groups.at(-1).map(({states}) => states.at(-1)));
    } else X = block(`h.${i}`, X, at, 1, memory);
  }
  const logits = readout(X), V = logits.length / at.length;
  return at.map((_, n) => ({groups: groups.map(tokens => tokens[n]), logits: row(logits, n, V)}));
}
