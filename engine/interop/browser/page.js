// The page: prompt and settings for all models, and for each its text, what else it considered, and where it looked.
"use strict";

const element = id => document.getElementById(id);
const worker = URL.createObjectURL(new Blob([element("worker").textContent], {type: "text/javascript"}));
const MARKS = {" ": "␣ space", "\n": "↵ newline", "\t": "⇥ tab", "\r": "␍ return"};
const TOLERANCE = 1e-3;  // of a logit
const ALTERNATIVES = 10;

class Model {
  constructor(model) {
    this.model = model;
    this.idOf = new Map(model.vocabulary.map((character, id) => [character, id]));
    this.card = element("models").appendChild(document.querySelector("template").content.cloneNode(true).children[0]);
    const find = selector => this.card.querySelector(selector);
    [this.status, this.text, this.panel] = [".status", ".text", ".look"].map(find);
    find("h2").textContent = model.name;
    find(".quality").textContent = model.facts[0]?.[1] ?? "";
    this.text.setAttribute("aria-label", `Text of ${model.name}`);
    for (const [label, value] of model.facts) {
      find("dl").append(Object.assign(document.createElement("dt"), {textContent: label}),
        Object.assign(document.createElement("dd"), {textContent: value}));
    }
    for (const [name, count] of [["layer", model.config.n_layer], ["head", model.config.n_head]]) {
      for (let i = 1; i <= count; i++) find(`.${name}`).add(new Option(i, i - 1));
      find(`.${name}`).onchange = () => this.look(this.at);
    }
    this.text.onclick = event => "at" in event.target.dataset && this.look(Number(event.target.dataset.at));
    this.text.onkeydown = event => {
      const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20}[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey || this.ids.length < 2) return;
      event.preventDefault();
      this.look(Math.min(Math.max((this.at ?? this.start - 1) + by, 1), this.ids.length - 1));
    };
    [this.ids, this.call, this.answers] = [[], 0, {}];
    this.unit = model.encoding === "bytes" ? "byte" : "character";
    this.worker = new Worker(worker);
    this.worker.onmessage = ({data}) => data.call === this.call && this.answers[data.kind](data);
    this.ask({kind: "load", model}, {ready: ({difference}) => {
      if (!(difference < TOLERANCE)) {
        find(".warning").textContent = `This page computes other numbers than PyTorch, by up to ${
          difference.toPrecision(2)}: do not trust the text. If model.py was edited, sample.py runs the model.`;
      }
      this.say("Ready.");
      delete model.weights;
      this.isReady = true;
      if (models.every(model => model.isReady)) document.querySelectorAll("button").forEach(b => (b.disabled = false));
    }});
  }

  say(text, isError = false) {
    this.status.textContent = text;
    this.status.classList.toggle("error", isError);
  }

  /** Sends a message; `answers` has a function for each kind of answer. It ends what was asked before. */
  ask(message, answers) {
    [this.isGenerating, this.status.ariaLive] = [false, "polite"];
    this.answers = {failed: ({message}) => this.say(message, true), done() {}, ...answers};
    this.worker.postMessage({...message, call: ++this.call});
  }

  /** The ids of a text; null, with a message, if it has a character that the model does not know. */
  encode(text, what) {
    const bytes = character => Array.from(new TextEncoder().encode(character), byte => String.fromCharCode(byte));
    const characters = Array.from(text);
    const ids = characters.map(character =>
      (this.model.encoding === "bytes" ? bytes(character) : [character]).map(part => this.idOf.get(part)));
    const unknown = characters.find((_, i) => ids[i].includes(undefined));
    if (unknown !== undefined) this.say(`${what}: the model does not know "${MARKS[unknown] ?? unknown}".`, true);
    return unknown === undefined ? ids.flat() : null;
  }

  /** How a character is shown alone; of bytes beyond ASCII, their number. */
  nameOf(character) {
    return MARKS[character] ?? (this.model.encoding === "bytes" && !/[!-~]/.test(character)
      ? `0x${character.charCodeAt(0).toString(16)}` : character);
  }

  /** Appends ids to the text. Of bytes, the last of a character shows it. */
  append(ids) {
    const atEnd = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 40;
    const spans = ids.map((id, i) => {
      const at = this.ids.length + i, character = this.model.vocabulary[id];
      const span = document.createElement("span");
      span.textContent = this.decoder
        ? this.decoder.decode(Uint8Array.of(character.charCodeAt(0)), {stream: true}) : character;
      span.dataset.at = at;
      if (at < this.start) span.className = "prompt";
      return span;
    });
    this.text.append(...spans);
    this.ids.push(...ids);
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  /** Ends what the model is doing, and says so. */
  stop() {
    const wasGenerating = this.isGenerating;
    this.ask({kind: "cancel"}, {});
    if (wasGenerating) this.say(`Stopped after ${this.ids.length - this.start} ${this.unit}s.`);
  }

  generate(prompt, options) {
    this.stop();
    [this.ids, this.at, this.panel.hidden] = [[], undefined, true];
    this.text.replaceChildren();
    const ids = this.encode(prompt || this.model.prompt, "Prompt"), stop = this.encode(options.stop, "Stop");
    if (!ids || !stop) return;
    this.start = ids.length;
    this.temperature = options.temperature || 1;
    this.hasLimits = options.topK > 0 || options.topP < 1;
    this.decoder = this.model.encoding === "bytes" ? new TextDecoder() : null;
    this.append(ids);
    const started = performance.now();
    this.ask({kind: "generate", ids, ...options, stop}, {
      done: ({cut = 0}) => {  // the stop text is not part of the text
        this.ids.length -= cut;
        for (; cut > 0; cut--) this.text.lastChild.remove();
        [this.isGenerating, this.status.ariaLive] = [false, "polite"];
        this.say(`${this.status.textContent.replace(/^\d+/, this.ids.length - this.start)}.`);
      },
      made: ({ids}) => {
        this.append(ids);
        const count = this.ids.length - this.start, seconds = (performance.now() - started) / 1000;
        this.say(`${count} ${this.unit}s, ${Math.round(count / seconds)} a second`);
      },
    });
    // Until the end nothing is announced: the status changes thirty times a second.
    [this.isGenerating, this.status.ariaLive] = [true, "off"];
  }

  /** How many characters the model saw before it made the one at a position: a full context begins again with its
   *  last half. */
  seen(at) {
    const size = this.model.config.block_size;
    let count = Math.min(at, this.start, size);
    for (let i = this.start; i < at; i++) count = count === size ? Math.max(1, size >> 1) : count + 1;
    return at < this.start ? Math.min(at, size) : count;
  }

  /** Shows what else the model considered for the character at a position, and where a head looked. */
  look(at) {
    if (at === 0) this.say(`Nothing stands before the first ${this.unit}.`);
    if (!(at > 0)) return;
    this.at = at;
    if (this.isGenerating) this.stop();
    for (const span of this.text.children) span.style.removeProperty("--seen");
    this.text.querySelector(".picked")?.classList.remove("picked");
    this.text.children[at].classList.add("picked");
    this.text.children[at].scrollIntoView({block: "nearest"});
    const [layer, head] = ["layer", "head"].map(name => Number(this.card.querySelector(`.${name}`).value));
    this.ask({kind: "look", ids: this.ids.slice(at - this.seen(at), at), layer, head}, {looked: ({logits, weights}) => {
      const highest = Math.max(...logits);
      const powers = logits.map(logit => Math.exp((logit - highest) / this.temperature));
      const sum = powers.reduce((a, b) => a + b), made = this.ids[at];
      const order = Array.from(powers.keys()).sort((a, b) => powers[b] - powers[a]);
      const shown = order.slice(0, ALTERNATIVES);
      if (!shown.includes(made)) shown.push(made);
      this.panel.querySelector("tbody").replaceChildren(...shown.map(id => {
        const row = document.createElement("tr"), share = powers[id] / sum;
        row.innerHTML = `<th scope="row"></th><td><i class="bar" style="width: ${100 * share}%"></i></td><td></td>`;
        row.className = id === made ? "made" : "";
        row.children[0].textContent = this.nameOf(this.model.vocabulary[id]);
        row.children[2].textContent = `${(100 * share).toPrecision(3)} %`;
        return row;
      }));
      const [likeliest] = order, name = id => this.nameOf(this.model.vocabulary[id]);
      const limits = this.hasLimits ? ", before top-k and top-p" : "";
      this.panel.querySelector("caption").textContent = `Instead of ${name(made)}, at a temperature of ${this.temperature}${
        limits}: ${name(likeliest)} was likeliest, ${(100 * powers[likeliest] / sum).toPrecision(3)} %`;
      this.panel.hidden = false;
      this.panel.scrollIntoView({block: "nearest"});  // on a phone it is below the screen
      const first = at - weights.length;
      weights.forEach((weight, i) => this.text.children[first + i].style.setProperty("--seen", Math.sqrt(weight)));
    }});
  }
}

const models = JSON.parse(element("data").textContent).map(model => new Model(model));
document.title = models.map(({model}) => model.name).join(", ");
document.querySelector("h1").textContent = document.title;
if (models.length === 1) document.querySelector("h2").hidden = true;  // the same
const number = id => Number(element(id).value);
document.querySelector("form").onsubmit = event => {
  event.preventDefault();
  const stop = element("stop").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
  const options = {count: number("count"), temperature: number("temperature"), topK: number("topK"),
    topP: number("topP"), seed: number("seed"), stop};
  for (const model of models) model.generate(element("prompt").value, options);
  models[0].text.scrollIntoView({block: "nearest"});  // on a phone it is below the screen
};
element("halt").onclick = () => models.forEach(model => model.stop());
