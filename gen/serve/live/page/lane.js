// A lane: one sampler, its call, and what comes of it.

import { events, post } from "./api.js";
import { download, make, newId } from "./dom.js";
import { TokenGrid } from "./grid.js";
import { isBeside, viewOf } from "./media.js";
import { shownCalls } from "./rules.js";

export const NAMES = { same_tokens: "same tokens", same_distribution: "same distribution", group: "same groups", approximate: "approximate" };
export const number = (value) => String(+value.toFixed(1));
export const tag = (guarantee) => make("span", { class: `tag ${guarantee}` }, NAMES[guarantee] || guarantee);
export const seconds = (value) => (value < 0.1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);

export class Lane {
  // call: what goes to the server; about: the sampler as the catalogue describes it
  // use: {edit(file), resume(file)}, what a reader may do with an output; null where it cannot be done
  constructor(call, modality, about, use) {
    Object.assign(this, { call, modality, about, use });
    this.items = new Map();
    this.state = "waiting";
    this.passes = make("dd", {}, "–");
    this.time = make("dd", {}, "–");
    this.tokens = make("dd", {}, "–");
    this.note = make("p", { class: "state" }, "waiting for a row");
    this.box = make("div", { class: "items" });
    const title = newId("lane");
    this.copy = make("details", { class: "copy" }, make("summary", {}, "Copy this call"));
    this.copy.addEventListener("toggle", () => this.copy.open && this.#fill());
    this.element = make("article", { class: "lane", "aria-labelledby": title },
      make("header", {}, make("h2", { id: title }, about.name), tag(about.guarantee), make("p", { class: "note" }, about.about)),
      make("dl", { class: "figures" }, make("div", {}, make("dt", {}, make("span", {}, "forward "), "passes"), this.passes), make("div", {}, make("dt", {}, "time"), this.time), make("div", {}, make("dt", {}, "tokens"), this.tokens)),
      this.note, this.box, this.copy);
  }

  async run() {
    this.abort = new AbortController();
    try {
      for await (const [name, data] of events(this.call, this.abort.signal)) this.#take(name, data);
      if (this.running) this.#over("failed", "the connection ended before the result");
    } catch (error) {
      if (error.name !== "AbortError") this.#failed(error);
      else if (this.running) this.#over("cancelled", "cancelled");
    }
    clearInterval(this.clock);
  }

  get running() { return this.state === "waiting" || this.state === "decoding"; }

  // The server ends the call and says so; where it does not answer, the connection is cut.
  cancel() {
    if (!this.running) return;
    this.note.textContent = "cancelling";
    if (!this.id) return this.abort.abort();
    post("live/cancel", { id: this.id }).catch(() => {});
    setTimeout(() => this.running && this.abort.abort(), 2000);
  }

  #take(name, data) {
    if (name === "start") {
      this.id = data.id;
      this.drafts = data.drafts; // what is computed and not kept was a rejected draft
      for (const { index, seed } of data.items) this.#item(index, seed);
    } else if (name === "canvas") this.items.get(data.item).plan(data);
    else if (name === "step") this.#step(data);
    else if (name === "part") this.items.get(data.item).part(data);
    else if (name === "result") this.#result(data);
    else if (name === "cancelled") this.#over("cancelled", "cancelled");
    else if (name === "error") this.#failed(data);
  }

  #failed({ message, param }) {
    this.fault = { message, param };
    this.#over("failed", message);
  }

  #item(index, seed) {
    const item = new Item(index, seed, this);
    this.items.set(index, item);
    this.box.append(item.element);
  }

  #step(data) {
    if (this.state === "waiting") {
      this.state = "decoding";
      this.note.textContent = "decoding";
      const began = performance.now();
      this.clock = setInterval(() => { if (this.running) this.time.textContent = seconds((performance.now() - began) / 1000); }, 50);
    }
    this.items.get(data.item).step(data);
    const all = [...this.items.values()];
    this.passes.textContent = Math.max(...all.map((item) => item.nfe));
    this.tokens.textContent = all.reduce((n, item) => n + item.known, 0);
  }

  #result(data) {
    this.result = data;
    this.state = "done";
    clearInterval(this.clock);
    const mean = (of) => data.items.reduce((sum, item) => sum + of(item), 0) / data.items.length;
    const [passes, drafts, tokens] = [mean((item) => item.nfe), mean((item) => item.draft_nfe || 0), mean((item) => item.tokens)];
    this.passes.replaceChildren(number(passes), ...(drafts ? [make("small", {}, ` + ${number(drafts)} of the draft model`)] : []));
    this.time.textContent = seconds(data.seconds);
    this.tokens.replaceChildren(number(tokens), make("small", {}, ` ${(tokens / passes).toFixed(1)} per pass`));
    data.items.forEach((item, i) => this.items.get(i).whole(item));
    this.note.textContent = `${data.items.length > 1 ? "means of the samples · " : ""}model ${data.model}`;
    this.element.dataset.state = "done";
  }

  #over(state, words) {
    this.state = state;
    clearInterval(this.clock);
    this.note.textContent = words;
    this.note.classList.toggle("bad", state === "failed");
    this.element.dataset.state = state;
    for (const item of this.items.values()) item.end();
  }

  async #fill() {
    if (this.copy.querySelector(".tabs")) return;
    let said;
    try { said = await post("live/copy", this.call); } catch (error) { this.copy.append(make("p", { class: "state bad" }, error.message)); return; }
    const panel = newId("panel"), shown = make("pre", { id: panel, role: "tabpanel", tabindex: 0 }), tabs = [];
    const choose = (name, tab) => {
      for (const other of tabs) { other.setAttribute("aria-selected", String(other === tab)); other.tabIndex = other === tab ? 0 : -1; }
      shown.textContent = said[name];
      shown.setAttribute("aria-label", tab.textContent);
    };
    for (const [name, words] of [["python", "Python"], ["curl", "curl"], ["job", "Job file"]]) {
      const tab = make("button", { type: "button", role: "tab", "aria-controls": panel, onclick: () => choose(name, tab) }, words);
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
        next.click();
        next.focus();
      });
      tabs.push(tab);
    }
    const done = make("span", { role: "status", class: "note" });
    const copy = make("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(shown.textContent); done.textContent = "copied"; } catch { getSelection().selectAllChildren(shown); done.textContent = "selected; press Ctrl+C"; }
    } }, "Copy");
    const files = ["source", "mask", "prefix"].filter((name) => this.call[name]).map((name) => {
      const file = this.call[name];
      return download({ ...file, name: `${name}.${file.name.split(".").pop()}` }, `${name}.${file.name.split(".").pop()}`);
    });
    const needed = files.length ? make("p", { class: "links" }, make("span", {}, "It reads"), ...files) : null;
    this.copy.append(...[make("div", { class: "tabs", role: "tablist", "aria-label": "forms of the call" }, ...tabs), shown, make("div", { class: "actions" }, copy, done), needed].filter(Boolean));
    choose("python", tabs[0]);
  }
}

class Item {
  constructor(index, seed, lane) {
    Object.assign(this, { index, seed, lane });
    this.nfe = 0;
    this.media = viewOf(lane.modality, lane.call.prompt);
    this.grid = null;
    const beside = isBeside(lane.modality);
    this.slot = make("div", { class: "slot" });
    this.view = make("div", { class: beside ? "view" : "view stacked" }, this.slot, this.media.element);
    this.links = make("p", { class: "links" }, make("span", { class: "state" }, `seed ${seed}`));
    this.replay = make("div", { class: "player" });
    this.replay.hidden = true;
    this.element = make("div", { class: "item" }, this.view, this.replay, this.links);
  }

  get known() { return this.grid ? this.grid.known : 0; }

  plan(data) {
    this.grid = new TokenGrid(data, this.lane.drafts);
    this.slot.replaceChildren(this.grid.element);
  }

  step(data) {
    this.nfe = data.nfe;
    this.grid.add(data);
    if (this.media.tokens) this.media.tokens(this.grid);
  }

  part(data) { this.media.part(data, this.grid ? this.grid.steps.length : 0); }

  end() { if (this.grid) this.grid.end(); }

  whole(data) {
    this.end();
    this.data = data;
    this.nfe = data.nfe;
    this.media.whole(data.media, this.grid ? this.grid.steps.length : 0);
    if (data.calls?.length) this.view.after(shownCalls(data.calls));
    const { use } = this.lane, { file, note } = data.media;
    if (file) this.links.append(download({ ...file, name: `${this.lane.modality}-${this.lane.about.name}-${this.seed}.${file.name.split(".").pop()}` }, "Download"));
    const action = (words, work) => this.links.append(make("button", { type: "button", class: "quiet", onclick: work }, words));
    if (use.edit && file) action("Edit this image", () => use.edit(file));
    if (use.resume && (data.kept || file)) action(this.media.audio ? "Continue this sound" : "Continue this clip", () => use.resume(data.kept || file));
    if (note) this.links.append(make("span", { class: "note" }, note));
    this.#offerReplay();
  }

  // The passes again, one by one.
  #offerReplay() {
    const count = this.grid ? this.grid.steps.length : 0;
    if (count < 2) return;
    const output = make("output", {});
    const slider = make("input", { type: "range", min: 0, max: count, value: count, "aria-label": "forward pass" });
    const button = make("button", { type: "button", "aria-label": "replay the forward passes" }, "▶");
    const show = (n) => {
      this.grid.over = n === count;
      this.grid.show(n);
      slider.value = n;
      output.textContent = `pass ${n} of ${count}`;
      if (this.media.at) this.media.at(n, count);
      if (this.media.tokens) this.media.tokens(this.grid);
    };
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "▶"; button.setAttribute("aria-label", "replay the forward passes"); };
    button.addEventListener("click", () => {
      if (timer) return stop();
      if (+slider.value >= count) show(0);
      button.textContent = "❚❚";
      button.setAttribute("aria-label", "pause the replay");
      timer = setInterval(() => {
        if (!slider.isConnected) return stop();
        show(+slider.value + 1);
        if (+slider.value >= count) stop();
      }, Math.min(400, Math.max(30, 6000 / count)));
    });
    slider.addEventListener("input", () => { stop(); show(+slider.value); });
    output.textContent = `pass ${count} of ${count}`;
    this.replay.append(button, slider, output);
    this.replay.hidden = false;
  }
}
