// A GPT in a web worker: plain JavaScript, one character at a time, with a KV cache.
//
// Messages to it have a `kind` and a `call`, which its answers repeat:
//   load {model}                              -> ready {difference}, from the logits that PyTorch put into the page
//   generate {ids, count, temperature, topK, topP, seed, stop}  -> made {ids}, again and again; then done
//   look {ids, layer, head}                   -> looked {logits, weights}, of the character that follows `ids`
//   cancel {}                                 ends what is being generated
"use strict";

/** Weights in 16 bits, base64, as 32-bit numbers. */
function decode(text) {
  const numbers = new Float32Array(1 << 16);
  for (let bits = 0; bits < numbers.length; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const size = exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24;
    numbers[bits] = exponent === 31 ? NaN : bits >> 15 ? -size : size;
  }
  const bytes = atob(text), weights = new Float32Array(bytes.length / 2);
  for (let i = 0; i < weights.length; i++) {
    weights[i] = numbers[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
  }
  return weights;
}

/** out = matrix x, of a matrix whose rows begin `stride` numbers apart. Four rows and two columns at a time, as each
 *  number is then fetched once for several products; past the last row, that row again. */
function multiply(matrix, stride, x, out) {
  const inputs = x.length, last = out.length - 1;
  for (let row0 = 0; row0 <= last; row0 += 4) {
    const row1 = Math.min(row0 + 1, last), row2 = Math.min(row0 + 2, last), row3 = Math.min(row0 + 3, last);
    const at0 = row0 * stride, at1 = row1 * stride, at2 = row2 * stride, at3 = row3 * stride;
    let sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0, i = 0;
    for (; i + 1 < inputs; i += 2) {
      const a = x[i], b = x[i + 1];
      sum0 += matrix[at0 + i] * a + matrix[at0 + i + 1] * b;
      sum1 += matrix[at1 + i] * a + matrix[at1 + i + 1] * b;
      sum2 += matrix[at2 + i] * a + matrix[at2 + i + 1] * b;
      sum3 += matrix[at3 + i] * a + matrix[at3 + i + 1] * b;
    }
    if (i < inputs) {  // an odd number of columns
      sum0 += matrix[at0 + i] * x[i];
      sum1 += matrix[at1 + i] * x[i];
      sum2 += matrix[at2 + i] * x[i];
      sum3 += matrix[at3 + i] * x[i];
    }
    out[row0] = sum0;
    out[row1] = sum1;
    out[row2] = sum2;
    out[row3] = sum3;
  }
}

/** Root mean square normalization of x[from] to x[to - 1], in place. */
function rmsNorm(x, from, to) {
  let sum = 0;
  for (let i = from; i < to; i++) sum += x[i] * x[i];
  const scale = 1 / Math.sqrt(sum / (to - from) + 1e-6);
  for (let i = from; i < to; i++) x[i] *= scale;
}

/** Layer normalization, in place. */
function layerNorm(x, weight, bias) {
  let mean = 0, variance = 0;
  for (const value of x) mean += value / x.length;
  for (const value of x) variance += (value - mean) ** 2 / x.length;
  const scale = 1 / Math.sqrt(variance + 1e-5);
  for (let i = 0; i < x.length; i++) x[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
}

/** GELU, x Phi(x), to 1e-7: the error function of Numerical Recipes (Press et al., 1992, section 6.2). */
function gelu(x) {
  const z = Math.abs(x) * Math.SQRT1_2, t = 1 / (1 + z / 2);
  const coefficients = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807,
    -1.13520398, 1.48851587, -0.82215223, 0.17087277];
  const tail = t * Math.exp(-z * z + coefficients.reduceRight((sum, c) => sum * t + c, 0)) / 2;
  return x * (x < 0 ? tail : 1 - tail);
}

class GPT {
  constructor({config, tensors, weights}) {
    const all = decode(weights);
    let at = 0;
    this.tensors = {};
    for (const [name, size] of tensors) this.tensors[name] = all.subarray(at, (at += size));
    Object.assign(this, config);
    this.layers = Array.from({length: config.n_layer}, () => ({
      keys: new Float32Array(config.block_size * config.n_embd),  // (positions, width)
      values: new Float32Array(config.block_size * config.n_embd),  // (width, positions)
      last: new Float32Array(config.n_embd),
    }));
    const D = config.n_embd / config.n_head;
    this.angles = Float64Array.from({length: D / 2}, (_, i) => config.rope_base ** (-2 * i / D));
    [this.cos, this.sin] = [this.angles.slice(), this.angles.slice()];  // of the position in `step`
    this.reset();
  }

  /** Forgets the characters so far. */
  reset() {
    this.length = 0;
    for (const layer of this.layers) layer.last.fill(0);
    this.codes = [0, 0, 0];  // of the last three characters, in the hash of n-grams
  }

  norm(x, name) {
    const y = x.slice();
    if (this.arch === "modern") rmsNorm(y, 0, y.length);
    else layerNorm(y, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`]);
    return y;
  }

  linear(x, name, outputs) {
    const out = new Float32Array(outputs), bias = this.tensors[`${name}.bias`];
    multiply(this.tensors[`${name}.weight`], x.length, x, out);
    if (bias) for (let i = 0; i < outputs; i++) out[i] += bias[i];
    return out;
  }

  /** The logits of the character that follows `id`. `look`, {layer, head}, gets the attention weights. */
  step(id, look) {
    const C = this.n_embd, position = this.length++;
    this.angles.forEach((angle, i) => {
      this.cos[i] = Math.cos(position * angle);
      this.sin[i] = Math.sin(position * angle);
    });
    const x = this.tensors["tok_emb.weight"].slice(id * C, (id + 1) * C);
    if (this.ngram_rows) {
      const codes = [...this.codes, this.ngram_codes[id]];
      this.ngram_factors.forEach((factors, table) => {
        const hash = factors.reduce((sum, factor, i) => sum + factor * codes[i], 0);
        const row = table * this.ngram_rows + hash % this.ngram_rows;
        for (let i = 0; i < C; i++) x[i] += this.tensors["ngrams.weight"][row * C + i];
      });
      this.codes = codes.slice(1);
    }
    if (this.arch === "modern") rmsNorm(x, 0, C);
    else for (let i = 0; i < C; i++) x[i] += this.tensors["pos_emb.weight"][position * C + i];
    this.layers.forEach((layer, number) => {
      const block = `blocks.${number}`;
      const attended = this.attend(this.norm(x, `${block}.ln_1`), layer, block, position,
        look && look.layer === number ? look : undefined);
      for (let i = 0; i < C; i++) x[i] += attended[i];
      let y = this.norm(x, `${block}.ln_2`);
      if (this.token_shift) {
        const shift = this.tensors[`${block}.shift.weight`], before = layer.last;
        layer.last = y;
        y = y.map((value, i) => value + before[i] * shift[i]);
      }
      const hidden = this.linear(y, `${block}.mlp.c_fc`, 4 * C);
      for (let i = 0; i < hidden.length; i++) {
        hidden[i] = this.arch === "modern" ? Math.max(hidden[i], 0) ** 2 : gelu(hidden[i]);
      }
      const out = this.linear(hidden, `${block}.mlp.c_proj`, C);
      for (let i = 0; i < C; i++) x[i] += out[i];
    });
    const head = this.tie_weights ? "tok_emb" : "head";
    const logits = this.linear(this.norm(x, "ln_f"), head, this.vocab_size);
    return this.arch === "modern" ? logits.map(logit => this.softcap * Math.tanh(logit / this.softcap)) : logits;
  }

  /** Causal attention of one position over itself and those in the cache. */
  attend(x, {keys, values}, block, position, look) {
    const C = this.n_embd, D = C / this.n_head, T = this.block_size, scale = Math.sqrt(D);
    const qkv = this.linear(x, `${block}.attn.c_attn`, 3 * C);
    if (this.arch === "modern") {
      for (let from = 0; from < 2 * C; from += D) {  // each head of the queries and of the keys
        for (let i = 0; i < D / 2; i++) {
          const cos = this.cos[i], sin = this.sin[i];
          const first = qkv[from + i], second = qkv[from + i + D / 2];
          qkv[from + i] = first * cos + second * sin;
          qkv[from + i + D / 2] = second * cos - first * sin;
        }
        rmsNorm(qkv, from, from + D);
      }
    }
    keys.set(qkv.subarray(C, 2 * C), position * C);
    for (let i = 0; i < C; i++) values[i * T + position] = qkv[2 * C + i];
    const y = new Float32Array(C), weights = new Float32Array(position + 1);
    for (let head = 0; head < this.n_head; head++) {
      const from = head * D;
      multiply(keys.subarray(from), C, qkv.subarray(from, from + D), weights);
      const highest = weights.reduce((a, b) => Math.max(a, b));
      let sum = 0;
      for (let t = 0; t <= position; t++) sum += weights[t] = Math.exp((weights[t] - highest) / scale);
      for (let t = 0; t <= position; t++) weights[t] /= sum;
      multiply(values.subarray(from * T), T, weights, y.subarray(from, from + D));
      if (look && look.head === head) look.weights = Array.from(weights);
    }
    return this.linear(y, `${block}.attn.c_proj`, C);
  }

  /** The logits of the character that follows `ids`, of which the last `block_size` are seen. */
  read(ids, look) {
    this.reset();
    let logits;
    const seen = ids.slice(-this.block_size);
    seen.forEach((id, i) => (logits = this.step(id, i === seen.length - 1 ? look : undefined)));
    return logits;
  }
}

/** Uniform numbers from 0 to 1 (mulberry32). */
function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t ^= t + Math.imul(t ^ (t >>> 7), 61 | t);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Draws an id: the likeliest at a temperature of 0, otherwise among the `topK` likeliest, or the fewest whose
 *  probabilities reach `topP`. */
function pick(logits, {temperature, topK, topP}, uniform) {
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
  if (!temperature) return order[0];
  let kept = topK ? order.filter(id => logits[id] >= logits[order[Math.min(topK, order.length) - 1]]) : order;
  const weigh = ids => ids.map(id => Math.exp((logits[id] - logits[order[0]]) / temperature));
  let weights = weigh(kept), sum = weights.reduce((a, b) => a + b);
  if (topP < 1) {
    let before = 0;
    const count = weights.findIndex(weight => (before += weight / sum) >= topP) + 1;
    if (count) kept = kept.slice(0, count);
    weights = weigh(kept);
    sum = weights.reduce((a, b) => a + b);
  }
  let left = uniform() * sum;
  const drawn = weights.findIndex(weight => (left -= weight) < 0);
  return kept[drawn < 0 ? kept.length - 1 : drawn];
}

let gpt, newest = 0;  // the call that may run
const channel = new MessageChannel();  // a turn of the event loop without setTimeout's 4 ms
const turn = () => new Promise(resume => {
  channel.port1.onmessage = resume;
  channel.port2.postMessage(0);
});

const answers = {
  load({model}) {
    gpt = new GPT(model);
    const logits = gpt.read(model.check.ids);
    const off = logits.map((logit, i) => Math.abs(logit - model.check.logits[i]));
    return {kind: "ready", difference: Math.max(...off)};
  },

  async generate({ids, count, seed, stop, call, ...options}) {
    const uniform = random(seed), text = ids.slice();
    let logits = gpt.read(text), made = [], shown = performance.now(), cut = 0;
    for (let i = 0; i < count; i++) {
      // A full context begins again with its last half, as in engine/generation.py.
      if (i && gpt.length === gpt.block_size) logits = gpt.read(text.slice(-Math.max(1, gpt.block_size >> 1)));
      else if (i) logits = gpt.step(text[text.length - 1]);
      const id = pick(logits, options, uniform);
      text.push(id);
      made.push(id);
      if (performance.now() - shown > 30 || i === count - 1) {
        postMessage({kind: "made", call, ids: made});
        [made, shown] = [[], performance.now()];
        await turn();
        if (newest !== call) break;
      }
      if (stop.length && text.length - ids.length >= stop.length
          && stop.every((id, k) => text[text.length - stop.length + k] === id)) {
        cut = stop.length;
        break;
      }
    }
    if (made.length) postMessage({kind: "made", call, ids: made});
    return {kind: "done", cut};
  },

  async look({ids, layer, head, call}) {
    await turn();
    if (newest !== call) return {kind: "done"};  // a key is held down
    const look = {layer, head};
    return {kind: "looked", logits: Array.from(gpt.read(ids, look)), weights: look.weights};
  },

  cancel: () => ({kind: "done"}),
};

onmessage = async ({data}) => {
  newest = data.call;
  try {
    postMessage({...await answers[data.kind](data), call: data.call});
  } catch (error) {
    postMessage({kind: "failed", call: data.call, message: String(error)});
  }
};
