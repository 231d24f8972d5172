// The token grid of one output: each cell says how its token came about.

import { colour, fitted, make, repainted } from "./dom.js";

export const STATES = {
  masked: "no token yet",
  window: "computed, not kept",
  drawn: "drawn",
  accepted: "draft accepted",
  rejected: "draft rejected",
  removed: "masked again",
};
const GAP = 1; // cells between two planes, such as the frames of a clip

export function paintCell(pen, state, x, y, side, colours) {
  const inset = Math.max(0.5, side * 0.06), size = side - 2 * inset;
  const base = state === "rejected" || state === "removed" ? "masked" : state;
  pen.fillStyle = colours[base];
  pen.fillRect(x + inset, y + inset, size, size);
  if (state !== "rejected" && state !== "removed") return;
  pen.strokeStyle = colours[state];
  pen.lineWidth = Math.max(1, side * 0.13);
  const [a, b, c, d] = [x + inset + pen.lineWidth / 2, y + inset + pen.lineWidth / 2, x + side - inset - pen.lineWidth / 2, y + side - inset - pen.lineWidth / 2];
  pen.beginPath();
  if (state === "removed") pen.rect(a, b, c - a, d - b);
  else { pen.moveTo(a, b); pen.lineTo(c, d); pen.moveTo(c, b); pen.lineTo(a, d); }
  pen.stroke();
}

export const cellColours = () => Object.fromEntries(Object.keys(STATES).map((name) => [name, colour(name)]));

export class TokenGrid {
  // plan: where positions are drawn; drafts: whether what is computed and not kept was a draft
  constructor(plan, drafts) {
    this.plan = plan;
    this.drafts = drafts;
    this.steps = [];
    this.shown = 0;
    this.kept = new Array(plan.length).fill("masked"); // after the steps that are shown
    this.tokens = new Array(plan.length).fill(null);
    this.texts = new Array(plan.length).fill(null);
    this.element = make("canvas", { class: "tokens", role: "img" });
    const lines = Math.ceil(plan.planes / plan.across);
    this.width = plan.across * (plan.columns + GAP) - GAP;
    this.height = lines * (plan.rows + GAP) - GAP;
    repainted(this.element, () => this.paint());
  }

  add(step) {
    const live = this.shown === this.steps.length;
    this.steps.push(step);
    if (live) this.show(this.steps.length);
  }

  show(count) {
    if (count < this.shown) {
      this.kept.fill("masked");
      this.texts.fill(null);
      this.shown = 0;
    }
    while (this.shown < count) this.#keep(this.steps[this.shown++]);
    this.#ask();
  }

  #keep(step) {
    const accepted = new Set(step.accepted);
    for (const p of step.removed) {
      this.kept[p] = "masked";
      this.texts[p] = null;
    }
    step.committed.forEach((p, i) => {
      this.kept[p] = accepted.has(p) ? "accepted" : "drawn";
      if (step.tokens) this.tokens[p] = step.tokens[i];
      if (step.texts) this.texts[p] = step.texts[i];
    });
  }

  // States to paint: those that were kept, and what the last of the shown steps did without keeping it.
  states() {
    const states = [...this.kept];
    const step = this.steps[this.shown - 1];
    if (!step || this.shown === this.steps.length && this.over) return states;
    for (const [first, last] of step.window) {
      for (let p = first; p <= last && p < states.length; p++) if (states[p] === "masked") states[p] = this.drafts ? "rejected" : "window";
    }
    for (const p of step.removed) if (states[p] === "masked" || states[p] === "window") states[p] = "removed";
    return states;
  }

  get known() { return this.kept.filter((state) => state !== "masked").length; }

  end() {
    this.over = true;
    this.#ask();
  }

  #ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }

  paint() {
    const { plan } = this, width = this.element.clientWidth;
    if (!width) return;
    const most = plan.planes === 1 && plan.rows === 1 ? 30 : 28;
    const side = Math.min(width / this.width, most);
    const height = side * this.height;
    this.element.style.height = `${height}px`;
    const pen = fitted(this.element, width, height), colours = cellColours();
    const per = plan.rows * plan.columns;
    this.states().forEach((state, p) => {
      const plane = Math.floor(p / per), rest = p % per;
      const [x, y] = plan.turned ? [Math.floor(rest / plan.rows), rest % plan.rows] : [rest % plan.columns, Math.floor(rest / plan.columns)];
      const line = Math.floor(plane / plan.across), across = plane % plan.across;
      paintCell(pen, state, (x + across * (plan.columns + GAP)) * side, (y + line * (plan.rows + GAP)) * side, side, colours);
    });
    const counts = {};
    for (const state of this.kept) counts[state] = (counts[state] || 0) + 1;
    const said = Object.entries(counts).map(([state, count]) => `${count} ${STATES[state]}`).join(", ");
    this.element.setAttribute("aria-label", `${plan.length} tokens after ${this.shown} forward passes: ${said}`);
  }
}

export function legend(box) {
  box.replaceChildren(...Object.entries(STATES).map(([state, words]) => {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const paint = () => paintCell(fitted(canvas, 15, 15), state, 0, 0, 15, cellColours());
    repainted(canvas, paint);
    return make("span", {}, canvas, words);
  }));
}
