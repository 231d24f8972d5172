// The call in the address, after the #, so that a link reproduces it. Media are not part of a link.

export function readAddress() {
  const words = location.hash.slice(1);
  if (!words.includes("=")) return null;
  const said = new URLSearchParams(words);
  const samplers = said.getAll("sampler").map((text) => {
    if (!text.startsWith("{")) return { name: text };
    try { return JSON.parse(text); } catch { return null; }
  }).filter((spec) => spec && typeof spec.name === "string");
  const sampling = {};
  for (const [key, value] of said) if (key.startsWith("sampling.")) sampling[key.slice(9)] = value;
  return {
    modality: said.get("modality") || "",
    model: said.get("model") || "",
    prompt: said.get("prompt") || "",
    seed: said.get("seed") || "0",
    samples: said.get("samples") || "1",
    samplers,
    sampling,
    rules: Object.fromEntries([...said].filter(([key]) => key.startsWith("rules.")).map(([key, value]) => [key.slice(6), value])),
  };
}

export function addressOf(state) {
  const said = new URLSearchParams({ modality: state.modality, model: state.model, prompt: state.prompt, seed: state.seed, samples: state.samples });
  for (const spec of state.samplers) said.append("sampler", Object.keys(spec).length > 1 ? JSON.stringify(spec) : spec.name);
  for (const [key, value] of Object.entries(state.sampling)) said.set(`sampling.${key}`, value);
  for (const [key, value] of Object.entries(state.rules)) said.set(`rules.${key}`, value);
  return `#${said}`;
}
