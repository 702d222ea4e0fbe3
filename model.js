// The model of model.py in JavaScript, one token after another, as decode.py runs it.
//
//     token -> embed -> block -> group -> group -> group -> block -> norm -> head -> logits
//     a group:  x = noise,  then again and again  x = norm(core(adapter([x ; e])))
//
// A token is a vector of C numbers. It sees earlier tokens through their keys and values, which
// `memory` keeps: {layer/k: [[key, value] of each token]}, with a slot for each loop step, see
// cache.py. `M` is the model: M.W its weights by their names in model.py, row by row.
//
//     x, e    the state of a token, and the stream that enters a group: Float32Arrays of length C
//     t, k    its position, from 0; the loop step, from 1
//     how     {n_loop, rule}: loops of each group, at most; an exit rule as in exits.py, or null
'use strict';

const add = (a, b) => a.map((value, i) => value + b[i]);
const minus = (a, b) => a.map((value, i) => value - b[i]);
const vector_norm = x => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
const cat = (a, b) => Float32Array.of(...a, ...b);
const silu = x => x.map(value => value / (1 + Math.exp(-value)));

function log_softmax(x) {
  const top = x.reduce((a, b) => Math.max(a, b), -Infinity);
  const total = top + Math.log(x.reduce((sum, value) => sum + Math.exp(value - top), 0));
  return x.map(value => value - total);
}

// y = W x, four rows of W at a time: three times as fast as one. The last four may overlap others
function linear(name, x) {
  const W = M.W[name + '.weight'], C = x.length, rows = W.length / C, y = new Float32Array(rows);
  for (let row = 0; row < rows; row += 4) {
    const first = Math.min(row, rows - 4);
    let a = 0, b = 0, c = 0, d = 0, at = first * C;
    for (let i = 0; i < C; i++, at++) {
      a += W[at] * x[i];
      b += W[at + C] * x[i];
      c += W[at + 2 * C] * x[i];
      d += W[at + 3 * C] * x[i];
    }
    y[first] = a, y[first + 1] = b, y[first + 2] = c, y[first + 3] = d;
  }
  return y;
}

function norm(name, x) {        // RMSNorm
  const W = M.W[name + '.weight'], scale = 1 / Math.sqrt(vector_norm(x) ** 2 / x.length + 1e-6);
  return x.map((value, i) => value * scale * W[i]);
}

function rotary(x, t) {         // turns adjacent pairs of numbers, in place
  for (let i = 0; i < x.length; i += 2) {
    const angle = t * M.rope_base ** -(i % M.D / M.D), cos = Math.cos(angle), sin = Math.sin(angle);
    [x[i], x[i + 1]] = [x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos];
  }
}

// the list of a layer and loop step, with its entries for tokens 0 ... t - 1
function slot(memory, layer, k, t) {
  const entries = memory[`${layer}/${k}`] ??= [];
  entries.length = t;           // forgets what came after them in a text that has changed
  return entries;
}

function attention(name, x, t, entries) {
  const C = x.length, D = M.D, qkv = linear(name + '.c_attn', x), y = new Float32Array(C);
  const [query, key, value] = [0, C, 2 * C].map(from => qkv.subarray(from, from + C));
  if (M.rope_base) rotary(query, t), rotary(key, t);
  entries.push([key, value]);
  for (let head = 0; head < C; head += D) {
    const scores = entries.map(([key]) => {
      let score = 0;
      for (let i = head; i < head + D; i++) score += query[i] * key[i];
      return score / Math.sqrt(D);
    });
    log_softmax(scores).forEach((log_p, at) => {
      const p = Math.exp(log_p), value = entries[at][1];
      for (let i = head; i < head + D; i++) y[i] += p * value[i];
    });
  }
  return linear(name + '.c_proj', y);
}

function block(name, x, t, k, memory) {         // attention and MLP, each between two norms
  const entries = slot(memory, name, k, t);
  x = norm(name + '.n2', add(x, attention(name + '.attn', norm(name + '.n1', x), t, entries)));
  const hidden = silu(linear(name + '.mlp.c_fc', norm(name + '.n3', x)));
  return norm(name + '.n4', add(x, linear(name + '.mlp.c_proj', hidden)));
}

// layers that loop -> all states, how many loop steps the token keeps, and its signals
function group(g, name, core, e, t, memory, {n_loop, rule}) {
  const blocks = Array.from({length: core}, (_, i) => `${name}.core.${i}`);
  const states = [M.x0[g].subarray(t * e.length, (t + 1) * e.length)], signals = [];     // x^(0)
  let streak = 0, memo, value;
  for (let k = 1; k <= n_loop; k++) {
    const x = states[k - 1];
    let x1 = linear(name + '.adapter', cat(x, e));
    for (const one of blocks) x1 = block(one, x1, t, k, memory);
    states.push(x1 = norm(name + '.norm', x1));
    if (!rule) continue;

    // Algorithm 1, for any signal; a rule that waits for the past takes the largest so far
    [value, memo] = rule.signal(x, x1, memo, readout);
    const past = slot(memory, name, 'past ' + k, t);
    past.push(value = rule.past ? Math.max(value, past[t - 1] ?? -Infinity) : value);
    signals.push(value);
    streak = value < rule.tau ? streak + 1 : 0;         // not while it is undefined
    if (streak < rule.hits) continue;
    if (!rule.keep) states.pop();                       // x1 is thrown away
    for (let later = k + 1; later <= n_loop; later++) { // an exited token keeps its last key
      for (const one of blocks) slot(memory, one, later, t).push(memory[`${one}/${k}`][t]);
      slot(memory, name, 'past ' + later, t).push(memory[`${name}/past ${later}`][t - 1]);
    }
    break;
  }
  return {states, signals, steps: states.length - 1};
}

const readout = x => linear('wte', norm('ln_f', x));    // the head is tied to the embedding

// one token after those in memory -> what each group found, and the logits of the next token
function read_token(id, t, memory, how) {
  const C = M.C, row = (table, i) => M.W[table].subarray(i * C, (i + 1) * C), groups = [];
  let x = row('wte.weight', id);
  if (!M.rope_base) x = add(x, row('wpe.weight', t));
  x = x.map(value => value * Math.sqrt(C));
  M.layers.forEach((core, i) => {                       // core: how many layers loop here, or 0
    if (!core) return x = block(`h.${i}`, x, t, 1, memory);
    groups.push(group(groups.length, `h.${i}`, core, x, t, memory, how));
    x = groups.at(-1).states.at(-1);
  });
  return {groups, logits: readout(x)};
}
