// The form, and the lanes that it starts.

import { get, post } from "./api.js";
import { at, base64Of, make, newId, repaintAll } from "./dom.js";
import { clearFaults, fault, showFault } from "./faults.js";
import { legend } from "./grid.js";
import { Lane, NAMES, number, seconds, tag } from "./lane.js";
import { MaskPainter } from "./mask.js";
import { offerRules, readRules, restoreRules, statedRules, watchRules } from "./rules.js";
import { addressOf, readAddress } from "./state.js";

const MOST_LANES = 3;
const SAMPLING = { temperature: ["0", "any"], top_k: ["0", "1"], top_p: ["0", "any"], min_p: ["0", "any"], guidance_scale: ["0", "any"], max_new_tokens: ["1", "1"] };
const NEUTRAL = { temperature: 1, top_k: 0, top_p: 1, min_p: 0, guidance_scale: 1, max_new_tokens: "the model's" };
let modalities = [], about = null; // about: the chosen model
let pickers = [], lanes = [];
let given = null; // media to start from: {source, painter} or {prefix}

// --- samplers

class Picker {
  constructor(number) {
    this.number = number;
    this.values = {};
    const id = newId("sampler");
    this.select = make("select", { id, onchange: () => { this.values = {}; this.describe(); changed(); } });
    this.promise = make("div", { class: "promise", "aria-live": "polite" });
    this.said = make("p", { class: "note" });
    this.params = make("div", { class: "parameters" });
    this.details = make("details", { hidden: true }, make("summary", {}, "Parameters"), this.params);
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `remove sampler ${number + 1}`, onclick: () => drop(this) }, "Remove");
    this.element = make("div", { class: "sampler" },
      make("div", { class: "head" }, make("label", { for: id }, number ? `Sampler ${number + 1}` : "Sampler"), number ? remove : null), this.select, this.promise, this.said, this.details);
  }

  offer() {
    const chosen = this.select.value, groups = {};
    for (const sampler of about.samplers) {
      groups[sampler.guarantee] ||= make("optgroup", { label: NAMES[sampler.guarantee] });
      groups[sampler.guarantee].append(make("option", { value: sampler.name }, sampler.name));
    }
    this.select.replaceChildren(...Object.values(groups));
    const known = about.samplers.some(({ name }) => name === chosen);
    this.choose(known ? chosen : about.sampler.name, known ? null : {});
  }

  choose(name, values = null) {
    this.select.value = name;
    if (this.select.value !== name) this.select.value = about.sampler.name;
    if (values) this.values = { ...values };
    return this.describe();
  }

  get brief() { return about.samplers.find(({ name }) => name === this.select.value); }
  get spec() { return { name: this.select.value, ...this.values }; }

  // `described` is settled once the parameters of the last choice are shown.
  describe() { return (this.described = this.#describe()); }

  async #describe() {
    const { brief } = this;
    if (!brief) return;
    const paper = /^\d{4}\.\d{4,5}$/.test(brief.paper) ? make("a", { href: `https://arxiv.org/abs/${brief.paper}`, rel: "noreferrer", target: "_blank" }, `arXiv ${brief.paper}`) : null;
    this.promise.replaceChildren(tag(brief.guarantee), `relative to ${brief.reference}`, ...(paper ? [paper] : []));
    this.said.textContent = brief.about;
    const asked = JSON.stringify(this.spec);
    this.asked = asked;
    try {
      const found = await get(`live/sampler?${new URLSearchParams({ model: at("model").value, spec: asked })}`);
      if (this.asked !== asked) return;
      this.promise.firstChild.replaceWith(tag(found.guarantee));
      this.fields(found.params);
    } catch (error) {
      if (this.asked === asked) showFault({ ...error, param: error.param || "sampler", message: error.message }, this);
    }
  }

  fields(params) {
    const focused = document.activeElement?.dataset.param, inside = this.params.contains(document.activeElement);
    this.params.replaceChildren(...params.map((param) => this.field(param)));
    if (inside && focused) this.params.querySelector(`[data-param="${focused}"]`)?.focus();
    this.details.hidden = !params.length;
  }

  field(param) {
    const id = newId("param"), value = this.values[param.name];
    let input;
    if (typeof param.default === "boolean" || param.options.length) {
      const options = param.options.length ? param.options : ["true", "false"];
      input = make("select", { id }, ...(param.default === null ? [make("option", { value: "" }, "–")] : []), ...options.map((word) => make("option", { value: word }, word)));
      input.value = String(value ?? param.default ?? "");
    } else {
      const number = typeof param.default === "number";
      input = make("input", { id, type: number && !/auto|or /.test(param.meaning) ? "number" : "text", step: "any", placeholder: param.default === null ? "none" : String(param.default) });
      if (value !== undefined) input.value = value;
    }
    input.dataset.param = param.name;
    const hint = newId("hint");
    input.setAttribute("aria-describedby", hint);
    input.addEventListener("input", () => this.take(param, input.value)); // Ctrl+Enter comes before a change
    input.addEventListener("change", () => { this.take(param, input.value); this.describe(); changed(); });
    return make("div", { class: "field" }, make("label", { for: id }, param.name), input, make("p", { class: "note", id: hint }, param.meaning));
  }

  take(param, text) {
    const value = read(text);
    if (value === undefined || value === param.default) delete this.values[param.name];
    else this.values[param.name] = value;
  }
}

function read(text) {
  const word = text.trim();
  if (word === "") return undefined;
  if (word === "true" || word === "false") return word === "true";
  return Number.isFinite(Number(word)) ? Number(word) : word;
}

function drop(picker) {
  pickers = pickers.filter((other) => other !== picker);
  picker.element.remove();
  at("compare").hidden = pickers.length >= MOST_LANES;
  at("compare").focus();
  changed();
}

function add(spec) {
  const picker = new Picker(pickers.length);
  pickers.push(picker);
  at("samplers").append(picker.element);
  picker.offer();
  at("compare").hidden = pickers.length >= MOST_LANES;
  if (spec) {
    const { name, ...values } = spec;
    picker.choose(name, values);
  }
  return picker;
}

// --- modality and model

const modality = () => modalities.find(({ name }) => name === document.querySelector("#modalities input:checked")?.value);

async function chooseModality(name, wanted = {}) {
  const input = [...document.querySelectorAll("#modalities input")].find(({ value }) => value === name) || document.querySelector("#modalities input");
  input.checked = true;
  const chosen = modality();
  begin(null);
  at("examples").replaceChildren(...chosen.examples.map((words) => make("button", { type: "button", title: words, onclick: () => { at("prompt").value = words; changed(); at("prompt").focus(); } }, words)));
  at("prompt").value = wanted.prompt ?? chosen.examples[0] ?? "";
  at("model").replaceChildren(...chosen.models.map(({ id, own }) => make("option", { value: id }, own ? `${id}: the one that suits the sampler` : id)));
  at("model").value = chosen.models.some(({ id }) => id === wanted.model) ? wanted.model : chosen.models[0].id;
  await chooseModel(wanted.samplers, wanted.sampling);
}

async function chooseModel(samplers, sampling = {}) {
  about = await get(`live/models/${encodeURIComponent(at("model").value)}`);
  for (const picker of pickers.splice(samplers?.length || pickers.length)) picker.element.remove();
  pickers.forEach((picker) => picker.offer());
  if (samplers) samplers.slice(0, MOST_LANES).forEach((spec, i) => { const { name, ...values } = spec; if (pickers[i]) pickers[i].choose(name, values); else add(spec); });
  if (!pickers.length) add();
  const shown = Object.entries(SAMPLING).filter(([name]) => about.texts || name !== "max_new_tokens");
  at("sampling").replaceChildren(...shown.map(([name, [min, step]]) => {
    const id = `sampling-${name}`, input = make("input", { id, type: "number", min, step, placeholder: about.sampling[name] ?? NEUTRAL[name], onchange: changed });
    input.value = sampling[name] ?? "";
    return make("div", { class: "field" }, make("label", { for: id }, name), input);
  }));
  at("examples").hidden = about.tools; // they are tasks of the models of the package
  offerStart();
  offerRules(about);
  changed();
  await Promise.all(pickers.map(({ described }) => described));
}

// --- media to start from

function offerStart() {
  const box = at("starting"), edits = Boolean(about.cells);
  box.hidden = !edits && !about.continues;
  at("starting-note").textContent = edits ? "Edit an image: choose one, or an output of this page, and paint what is made anew." : "Continue a clip or a sound: choose one, or an output of this page. Every output begins with it.";
  at("file").accept = edits ? "image/png" : about.modality === "video" ? "video/*,.mkv" : "audio/*";
}

function begin(start, ...shown) {
  given = start;
  const drop = make("button", { type: "button", class: "quiet", onclick: () => begin(null) }, "Start from nothing");
  at("given").replaceChildren(...(start ? [...shown, drop] : []));
  if (!start) at("file").value = "";
  for (const picker of pickers) for (const option of picker.select.options) option.disabled = Boolean(start?.source) && !about.samplers.find(({ name }) => name === option.value)?.edits;
}

async function edit(file) {
  const image = new Image();
  image.src = `data:image/png;base64,${file.data}`;
  try { await image.decode(); } catch { at("alert").textContent = "The file is no image that this browser reads."; return; }
  const painter = new MaskPainter(image, about.cells, () => { at("alert").textContent = ""; });
  begin({ source: { name: "source.png", type: "image/png", data: file.data }, painter }, painter.element);
  at("starting").open = true;
  painter.canvas.scrollIntoView({ block: "nearest" });
  painter.canvas.focus();
}

function resume(file) {
  const id = newId("share"), output = make("output", {}, "50 %");
  const slider = make("input", { id, type: "range", min: 10, max: 90, step: 5, value: 50, oninput: () => { output.textContent = `${slider.value} %`; } });
  const field = make("div", { class: "field" }, make("label", { for: id }, "Share of it that is kept"), make("div", { class: "player" }, slider, output));
  begin({ resumed: file, share: () => +slider.value / 100 }, make("p", { class: "note" }, `Continues ${file.name}.`), field);
  at("starting").open = true;
  slider.focus();
}

at("file").addEventListener("change", async () => {
  const file = at("file").files[0];
  if (!file) return;
  const data = base64Of(new Uint8Array(await file.arrayBuffer()));
  if (about.cells) edit({ name: file.name, data });
  else resume({ name: file.name, type: file.type, data });
});

async function media() {
  if (!given) return {};
  if (given.source) {
    if (given.painter.isEmpty) throw fault("mask", "The mask is empty: paint the part of the image that is made anew.");
    return { source: given.source, mask: await given.painter.file() };
  }
  return { prefix: await post("live/prefix", { model: at("model").value, file: { name: given.resumed.name, data: given.resumed.data }, share: given.share() }) };
}

// --- calls

function sampling() {
  const found = {};
  for (const name of Object.keys(SAMPLING)) {
    const value = read(at(`sampling-${name}`)?.value ?? "");
    if (value !== undefined) found[name] = value;
  }
  return found;
}

const stated = () => ({ modality: modality().name, model: at("model").value, prompt: at("prompt").value, seed: at("seed").value, samples: at("samples").value, samplers: pickers.map(({ spec }) => spec), sampling: sampling(), rules: statedRules() });

let ready = false;
function changed() {
  if (ready && about) history.replaceState(null, "", addressOf(stated()));
}

const running = () => lanes.some((lane) => lane.running);

async function generate() {
  if (running()) return;
  clearFaults();
  let start;
  try { start = { ...readRules(), ...await media() }; } catch (error) { showFault(error); return; }
  changed();
  const name = modality().name;
  const use = { edit: about.cells ? edit : null, resume: about.continues ? resume : null };
  lanes = pickers.map((picker) => new Lane({
    model: at("model").value, prompt: at("prompt").value, sampler: picker.spec, sampling: sampling(), seed: at("seed").valueAsNumber, num_samples: at("samples").valueAsNumber, ...start,
  }, name, picker.brief, use));
  at("empty").hidden = true;
  at("legend").hidden = false;
  at("comparison").hidden = true;
  at("lanes").replaceChildren(...lanes.map(({ element }) => element));
  at("lanes").className = `lanes ${["single", "pair", "triple"][lanes.length - 1]}`;
  busy(true);
  at("status").textContent = `decoding with ${lanes.map((lane) => lane.about.name).join(" and ")}`;
  if (matchMedia("(max-width: 60rem)").matches) at("stage").scrollIntoView({ block: "start" });
  await Promise.all(lanes.map((lane) => lane.run()));
  busy(false);
  const wrong = lanes.findIndex((lane) => lane.fault?.param);
  if (wrong >= 0) showFault(lanes[wrong].fault, pickers[wrong]);
  at("status").textContent = lanes.map((lane) => `${lane.about.name}: ${lane.result ? `${lane.passes.textContent} forward passes, ${lane.time.textContent}` : lane.note.textContent}`).join("; ");
  compare();
}

function busy(on) {
  at("generate").disabled = on;
  at("cancel").disabled = !on;
  if (!on && document.activeElement === document.body) at("generate").focus({ preventScroll: true });
}

function compare() {
  const done = lanes.filter((lane) => lane.result);
  if (done.length < 2) return;
  const first = done[0].result.items.map((item) => item.digest).join();
  const mean = (lane, of) => lane.result.items.reduce((sum, item) => sum + of(item), 0) / lane.result.items.length;
  const rows = done.map((lane, i) => {
    const same = lane.result.items.map((item) => item.digest).join() === first;
    const passes = mean(lane, (item) => item.nfe), drafts = mean(lane, (item) => item.draft_nfe || 0);
    const cells = [number(passes), drafts ? number(drafts) : "–", (mean(lane, (item) => item.tokens) / passes).toFixed(1), seconds(lane.result.seconds)];
    return make("tr", {}, make("th", { scope: "row" }, lane.about.name), make("td", {}, tag(lane.result.guarantee)), ...cells.map((text) => make("td", {}, text)),
      make("td", {}, i ? make("span", { class: same ? "yes" : "no" }, same ? "yes" : "no") : "–"));
  });
  const head = ["sampler", "guarantee", "forward passes", "drafting passes", "tokens per pass", "time", "same tokens"];
  at("comparison").querySelector(".scroll").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows)));
  at("comparison").hidden = false;
}

const cancel = () => lanes.forEach((lane) => lane.cancel());

at("call").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
at("cancel").addEventListener("click", cancel);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running()) { event.preventDefault(); cancel(); }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("call").requestSubmit(); }
});
at("compare").addEventListener("click", () => {
  const used = pickers.map((picker) => picker.select.value);
  const usual = ["autoregressive", "speculative_jacobi", "maskgit", "next_scale"].find((name) => !used.includes(name) && about.samplers.some((sampler) => sampler.name === name));
  const picker = add(usual ? { name: usual } : null);
  picker.select.focus();
  changed();
});
at("dice").addEventListener("click", () => { at("seed").value = Math.floor(Math.random() * 1e6); changed(); });
for (const name of ["prompt", "seed", "samples"]) at(name).addEventListener("input", changed);
at("model").addEventListener("change", () => chooseModel().catch(tell));

const THEMES = ["system", "light", "dark"];
function showTheme() { at("theme").textContent = `Theme: ${document.documentElement.dataset.theme || "system"}`; }
at("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "system", next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* for this page alone */ }
  showTheme();
  repaintAll();
});

function tell(error) { showFault(error); }

async function restore() {
  ready = false;
  const said = readAddress() || {};
  await chooseModality(said.modality || modalities[0].name, said.modality ? said : {});
  if (said.seed) at("seed").value = said.seed;
  if (said.samples) at("samples").value = said.samples;
  restoreRules(said.rules || {});
  ready = true;
}
addEventListener("hashchange", () => restore().catch(tell));

async function open() {
  showTheme();
  watchRules(changed);
  legend(at("legend"));
  modalities = await get("live/modalities");
  at("modalities").querySelector("div").replaceChildren(...modalities.map(({ name }) => {
    const input = make("input", { type: "radio", name: "modality", value: name, onchange: () => { chooseModality(name).catch(tell); } });
    return make("label", {}, input, make("span", {}, name));
  }));
  await restore();
  document.documentElement.dataset.ready = "yes";
}
open().catch(tell);
