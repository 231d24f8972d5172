// Errors beside the field that they are about.

import { at, make, newId } from "./dom.js";

// names of parameters of the API, and the fields of the page
const FIELDS = { prompt: "prompt", messages: "prompt", seed: "seed", num_samples: "samples", n: "samples", model: "model", structured: "rule-value", tools: "tools", tool_choice: "tool-choice", source: "file", mask: "file", prefix: "file", file: "file" };

function fieldOf(param, picker) {
  const [first, second] = param.replace(/^sampling\./, "").split(".");
  if (first === "sampler" && picker) return (second && picker.params.querySelector(`[data-param="${CSS.escape(second)}"]`)) || picker.select;
  return at(FIELDS[first] || `sampling-${first}`);
}

// Error of a field, as those of the server are: it names its parameter.
export function fault(param, message) { return Object.assign(new Error(message), { param }); }

// Show an error at its field, which gets the focus; below the form where no field is meant. `picker`: sampler of the call.
export function showFault({ param, message }, picker = null) {
  const field = param ? fieldOf(param, picker) : null, box = field?.closest(".field, .sampler");
  if (!box || box.hidden || box.closest("[hidden]")) {
    at("alert").textContent = message;
    return;
  }
  for (let outer = field.closest("details"); outer; outer = outer.parentElement.closest("details")) outer.open = true;
  forget(field);
  const id = newId("fault"), before = field.getAttribute("aria-describedby");
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", [before, id].filter(Boolean).join(" "));
  const note = make("p", { class: "fault", id, role: "alert" }, message);
  (field.closest(".joined") || field).after(note);
  field.forget = () => {
    note.remove();
    field.removeAttribute("aria-invalid");
    if (before) field.setAttribute("aria-describedby", before); else field.removeAttribute("aria-describedby");
  };
  field.addEventListener("input", () => forget(field), { once: true });
  field.focus({ preventScroll: true });
  box.scrollIntoView({ block: "nearest" });
}

function forget(field) {
  field.forget?.();
  delete field.forget;
}

export function clearFaults() {
  at("alert").textContent = "";
  for (const field of document.querySelectorAll("[aria-invalid]")) forget(field);
}
