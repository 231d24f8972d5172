// Elements, files and numbers. Texts become text nodes alone, so that a prompt never becomes markup.

export const at = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

let numbers = 0;
export const newId = (word) => `${word}-${++numbers}`;

export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

export function base64Of(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

export const pngAddress = (base64) => `data:image/png;base64,${base64}`;

export function blobAddress(file) {
  return URL.createObjectURL(new Blob([bytesOf(file.data)], { type: file.type || "application/octet-stream" }));
}

export function download(file, words) {
  return make("a", { href: blobAddress(file), download: file.name }, words);
}

// Size a canvas to its place on the page, in the pixels of the screen.
export function fitted(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// Colours are those of the style sheet. A canvas cannot read light-dark(), so an element resolves it.
const probe = make("span", { hidden: true });
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const painters = new Set();
export function repainted(element, paint) {
  const entry = { element, paint };
  painters.add(entry);
  new ResizeObserver(() => element.isConnected && paint()).observe(element);
}
export function repaintAll() {
  for (const entry of painters) {
    if (entry.element.isConnected) entry.paint();
    else painters.delete(entry);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);

export const calm = matchMedia("(prefers-reduced-motion: reduce)");
