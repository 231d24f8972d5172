// Tools and structured output: what the answer of a text model may call, and the rule that it obeys.

import { at, make } from "./dom.js";
import { fault } from "./faults.js";

const TOOL = { type: "function", function: { name: "get_weather", description: "Get the weather of a city", parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city", "unit"] } } };
// kinds of rules: name of the value, an example, and whether it is JSON
const RULES = {
  json_schema: ["JSON schema", '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}', true],
  regex: ["Regular expression", "[0-9]( [0-9])*", false],
  choice: ["Texts, one per line", "yes\nno", false],
  grammar: ["Grammar in Lark's syntax", 'start: "yes" | "no"', false],
};
let takesTools = false;

export function offerRules(about) {
  at("rules").hidden = !about.texts;
  takesTools = about.tools;
  at("tools-field").hidden = !takesTools;
  at("tools-note").hidden = takesTools;
  showRule();
  showChoices();
}

function showRule() {
  const [name, example] = RULES[at("rule").value] || [];
  at("rule-field").hidden = !name;
  if (!name) return;
  at("rule-label").textContent = name;
  at("rule-value").placeholder = example;
}

function read(text, param) {
  try { return JSON.parse(text); } catch (error) { throw fault(param, `This is no JSON: ${error.message}`); }
}

// Names of the functions become choices.
function showChoices() {
  const given = takesTools && at("tools").value.trim(), chosen = at("tool-choice").value;
  let names = [];
  try { names = JSON.parse(given || "[]").map((tool) => tool.function.name); } catch { /* the call says so */ }
  const usual = [["auto", "if the model decides to"], ["required", "in any case"], ["none", "not this time"]];
  at("tool-choice").replaceChildren(...usual.map(([value, words]) => make("option", { value }, words)), ...names.map((name) => make("option", { value: `=${name}` }, `${name} alone`)));
  at("tool-choice").value = chosen;
  if (at("tool-choice").selectedIndex < 0) at("tool-choice").value = "auto";
  at("choice-field").hidden = !given;
}

// Keys of the call; throws an error of a field.
export function readRules() {
  const found = {};
  if (at("rules").hidden) return found;
  const kind = at("rule").value, value = at("rule-value").value, [, , isJson] = RULES[kind] || [];
  if (kind) {
    if (!value.trim()) throw fault("structured", "The rule is empty.");
    found.structured = { [kind]: isJson ? read(value, "structured") : kind === "choice" ? value.split("\n").filter(Boolean) : value };
  }
  if (takesTools && at("tools").value.trim()) {
    const choice = at("tool-choice").value;
    found.tools = read(at("tools").value, "tools");
    found.tool_choice = choice.startsWith("=") ? { type: "function", function: { name: choice.slice(1) } } : choice;
  }
  return found;
}

// What a link holds of them.
const KEPT = ["rule", "rule-value", "tools", "tool-choice"];
export const statedRules = () => Object.fromEntries(at("rules").hidden ? [] : KEPT.filter((name) => at(name).value && !(name === "tool-choice" && at("choice-field").hidden)).map((name) => [name, at(name).value]));
export function restoreRules(said) {
  for (const name of KEPT.slice(0, 3)) at(name).value = said[name] || "";
  showRule();
  showChoices();
  at("tool-choice").value = said["tool-choice"] || "auto";
  if (Object.keys(said).length) at("rules").open = true;
}

export function watchRules(changed) {
  at("rule").addEventListener("change", () => { showRule(); changed(); });
  at("tools").addEventListener("input", showChoices);
  for (const name of ["rule-value", "tools", "tool-choice"]) at(name).addEventListener("change", changed);
  at("tools-example").addEventListener("click", () => { at("tools").value = JSON.stringify([TOOL], null, 1); at("tools").dispatchEvent(new Event("input")); changed(); at("tools").focus(); });
  at("rule-example").addEventListener("click", () => { at("rule-value").value = at("rule-value").placeholder; at("rule-value").dispatchEvent(new Event("input")); changed(); at("rule-value").focus(); });
}

// Calls of an output: the name of the function, and its arguments.
export function shownCalls(calls) {
  const pretty = (text) => { try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text; } };
  return make("ul", { class: "calls", "aria-label": "calls" }, ...calls.map(({ name, arguments: given }) => make("li", {}, make("strong", {}, name), make("pre", { tabindex: 0 }, pretty(given)))));
}
