// Outputs as they come and as they end: images, clips, sounds, texts, motions, actions.

import { blobAddress, bytesOf, calm, colour, fitted, make, pngAddress, repainted } from "./dom.js";

const playing = new Set();
const alone = (player) => { for (const other of playing) if (other !== player) other.pause(); };

// Play, pause and a slider over frames that something draws.
class Frames {
  constructor(words, draw) {
    this.draw = draw;
    this.count = 0;
    this.rate = 8;
    this.frame = 0;
    this.button = make("button", { type: "button", "aria-label": `play ${words}`, onclick: () => (this.timer ? this.pause() : this.play()) }, "▶");
    this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": `frame of ${words}`, oninput: () => { this.pause(); this.show(+this.slider.value); } });
    this.words = words;
    this.output = make("output", {});
    this.element = make("div", { class: "player" }, this.button, this.slider, this.output);
    this.element.hidden = true;
  }

  lengthen(count, rate) {
    this.count = count;
    this.rate = rate || this.rate;
    this.slider.max = Math.max(0, count - 1);
    this.element.hidden = count < 2;
  }

  show(frame) {
    this.frame = Math.max(0, Math.min(frame, this.count - 1));
    this.slider.value = this.frame;
    this.output.textContent = `frame ${this.frame + 1} of ${this.count}`;
    this.draw(this.frame);
  }

  play() {
    playing.add(this);
    this.button.textContent = "❚❚";
    this.button.setAttribute("aria-label", `pause ${this.words}`);
    clearInterval(this.timer);
    this.timer = setInterval(() => {
      if (!this.element.isConnected) return this.pause();
      this.show((this.frame + 1) % this.count);
    }, 1000 / this.rate);
  }

  pause() {
    playing.delete(this);
    clearInterval(this.timer);
    this.timer = null;
    this.button.textContent = "▶";
    this.button.setAttribute("aria-label", `play ${this.words}`);
  }

  begin() { if (!calm.matches && this.count > 1) this.play(); else this.show(0); }
}

class ImageView {
  constructor(prompt) {
    this.image = make("img", { alt: "" });
    this.image.hidden = true;
    this.waiting = make("div", { class: "waiting" });
    this.element = make("div", { class: "medium" }, this.image, this.waiting);
    this.prompt = prompt;
    this.seen = []; // [pass, address]
  }

  part(data, pass) { this.#set(data, pass, data.preview ? `unfinished image: ${this.prompt}` : this.prompt); }
  whole(data, pass) { this.#set(data, pass, this.prompt); }

  #set(data, pass, alt) {
    this.seen.push([pass, pngAddress(data.png)]);
    this.#show(this.seen.at(-1)[1], alt);
  }

  #show(address, alt) {
    this.image.src = address;
    this.image.alt = alt;
    this.image.hidden = false;
    this.waiting.hidden = true;
  }

  at(pass, last) {
    const until = pass >= last ? this.seen.at(-1) : this.seen.findLast(([n]) => n <= pass);
    this.image.hidden = !until;
    this.waiting.hidden = Boolean(until);
    this.waiting.textContent = pass && this.seen[0][0] === last ? "No preview: every token may change until the end." : "";
    if (until) this.#show(until[1], this.prompt);
  }
}

class ClipView {
  constructor(prompt) {
    this.canvas = make("canvas", { class: "pixels", role: "img", "aria-label": prompt });
    this.chart = make("canvas", { class: "chart", role: "img", "aria-label": "actions over time: x and y" });
    this.chart.hidden = true;
    this.frames = [];
    this.player = new Frames("the clip", (frame) => this.#draw(frame));
    this.element = make("div", { class: "medium" }, this.canvas, this.player.element, this.chart);
    this.work = Promise.resolve();
    repainted(this.chart, () => this.#plot());
  }

  part(data) { this.#add(data); }

  whole(data) {
    if (data.actions) { this.actions = data.actions; this.chart.hidden = false; this.#plot(); }
    this.work = this.work.then(() => { this.frames = []; });
    this.#add(data);
    this.work = this.work.then(() => this.player.begin());
  }

  #add(data) {
    this.work = this.work.then(async () => {
      let left = data.frames;
      for (const strip of data.strips) {
        const image = new Image();
        image.src = pngAddress(strip);
        await image.decode();
        const count = Math.min(16, left), height = image.naturalHeight / count;
        left -= count;
        for (let i = 0; i < count; i++) this.frames.push(await createImageBitmap(image, 0, i * height, image.naturalWidth, height));
      }
      this.player.lengthen(this.frames.length, data.rate);
      if (!this.player.timer) this.player.show(this.frames.length - 1);
    });
  }

  #draw(frame) {
    const bitmap = this.frames[frame];
    if (!bitmap) return;
    if (this.canvas.width !== bitmap.width || this.canvas.height !== bitmap.height) {
      [this.canvas.width, this.canvas.height] = [bitmap.width, bitmap.height];
      this.canvas.style.aspectRatio = `${bitmap.width} / ${bitmap.height}`;
    }
    this.canvas.getContext("2d").drawImage(bitmap, 0, 0);
    this.#plot();
  }

  #plot() {
    const [width, height] = [this.chart.clientWidth, this.chart.clientHeight];
    if (!this.actions || !width) return;
    const pen = fitted(this.chart, width, height), n = this.actions.length, middle = height / 2;
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(0, middle); pen.lineTo(width, middle); pen.stroke();
    ["drawn", "removed"].forEach((name, axis) => {
      pen.strokeStyle = colour(name);
      pen.lineWidth = 2;
      pen.beginPath();
      this.actions.forEach((action, i) => pen.lineTo((i + 0.5) / n * width, middle - action[axis] * (middle - 3)));
      pen.stroke();
    });
    pen.fillStyle = colour("ink");
    pen.fillRect(Math.min(1, this.player.frame / n) * width, 0, 1, height);
  }
}

class SoundView {
  constructor(prompt) {
    this.wave = make("canvas", { class: "wave", role: "img", "aria-label": `waveform: ${prompt}` });
    this.audio = make("audio", { controls: true, preload: "auto", "aria-label": prompt });
    this.audio.hidden = true;
    this.pieces = [];
    this.element = make("div", { class: "medium" }, this.wave, this.audio);
    const follow = () => { this.#paint(); if (!this.audio.paused && this.audio.isConnected) requestAnimationFrame(follow); };
    this.audio.addEventListener("play", () => { playing.add(this.audio); alone(this.audio); follow(); });
    this.audio.addEventListener("seeking", () => this.#paint());
    this.wave.addEventListener("click", (event) => {
      const box = this.wave.getBoundingClientRect();
      if (this.audio.duration) this.audio.currentTime = (event.clientX - box.left) / box.width * this.audio.duration;
      this.audio.play().catch(() => {});
    });
    repainted(this.wave, () => this.#paint());
  }

  part(data) {
    this.pieces.push(new Int16Array(bytesOf(data.samples).buffer));
    this.#paint();
  }

  whole(data) {
    this.pieces = [new Int16Array(bytesOf(data.samples).buffer)];
    this.done = true;
    if (data.file) {
      this.audio.src = blobAddress(data.file);
      this.audio.hidden = false;
    }
    this.#paint();
  }

  #paint() {
    const [width, height] = [this.wave.clientWidth, this.wave.clientHeight];
    if (!width) return;
    const pen = fitted(this.wave, width, height), count = this.pieces.reduce((n, piece) => n + piece.length, 0);
    if (!count) return;
    // until its end is known, a sound is drawn on the time axis that it grows along
    const total = this.done ? count : Math.max(count, this.longest || 0, 24000);
    this.longest = total;
    const all = new Float32Array(count);
    let from = 0;
    for (const piece of this.pieces) { for (let i = 0; i < piece.length; i++) all[from + i] = piece[i] / 32768; from += piece.length; }
    const bars = Math.floor(width / 3);
    const played = this.audio.duration ? this.audio.currentTime / this.audio.duration : 0;
    const [done, later] = [colour("accepted"), colour("drawn")];
    for (let bar = 0; bar < bars; bar++) {
      const [a, b] = [Math.floor(bar / bars * total), Math.floor((bar + 1) / bars * total)];
      if (a >= count) break;
      let peak = 0;
      for (let i = a; i < Math.min(b, count); i++) peak = Math.max(peak, Math.abs(all[i]));
      const tall = Math.max(1, Math.sqrt(peak) * (height - 8));
      pen.fillStyle = played && bar / bars < played ? done : later;
      pen.fillRect(bar * 3, (height - tall) / 2, 2, tall);
    }
  }
}

class TextView {
  constructor() {
    this.body = make("div", { class: "text" });
    this.element = make("div", { class: "medium" }, this.body);
    this.said = "";
  }

  part(data) { this.said += data.text; if (!this.pieces) this.body.textContent = this.said; }

  whole(data) { this.final = data.text; if (!this.pieces) this.body.textContent = data.text; }

  // Tokens of the grid: accepted drafts are marked, and masked positions before others are dots.
  tokens(grid) {
    const last = grid.kept.findLastIndex((state) => state !== "masked");
    if (grid.texts.every((text) => text === null) && last >= 0) return;
    this.pieces = true;
    const spans = [];
    for (let p = 0; p <= last; p++) {
      const state = grid.kept[p];
      if (state === "masked") spans.push(make("span", { class: "masked" }, " ·"));
      else if (grid.texts[p]) spans.push(make("span", { class: state, title: `position ${p}: ${state === "accepted" ? "draft accepted" : "drawn"}` }, grid.texts[p]));
    }
    this.body.replaceChildren(...spans);
  }
}

const LIMBS = { left: [236, 112, 48], right: [42, 110, 187], body: null };
const FOCAL = 2.2, NEAR = 5.4;

class MotionView {
  constructor(prompt) {
    this.canvas = make("canvas", { class: "figure", role: "img", "aria-label": `figure: ${prompt}` });
    this.player = new Frames("the motion", () => this.#draw());
    this.turn = make("input", { type: "range", min: -180, max: 180, value: 35, "aria-label": "angle of the camera", oninput: () => this.#draw() });
    this.camera = make("label", { class: "player" }, make("span", {}, "Camera"), this.turn);
    this.camera.hidden = true;
    this.element = make("div", { class: "medium" }, this.canvas, this.player.element, this.camera);
    let held = null;
    this.canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, +this.turn.value]; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      this.turn.value = ((held[1] - (event.clientX - held[0]) / 2 + 540) % 360) - 180;
      this.#draw();
    });
    this.canvas.addEventListener("pointerup", () => { held = null; });
    repainted(this.canvas, () => this.#draw());
  }

  part(data) { this.whole(data); }

  whole(data) {
    this.joints = new Float32Array(bytesOf(data.joints).buffer);
    this.parents = data.parents;
    this.frames = data.frames;
    this.camera.hidden = false;
    this.player.lengthen(data.frames, data.rate);
    this.player.begin();
  }

  #joint(frame, j) {
    const i = 3 * (frame * this.parents.length + j);
    return [this.joints[i], this.joints[i + 1], this.joints[i + 2]];
  }

  #draw() {
    const side = this.canvas.clientWidth;
    if (!this.joints || !side) return;
    const pen = fitted(this.canvas, side, this.canvas.clientHeight), frame = this.player.frame;
    const [a, e] = [+this.turn.value * Math.PI / 180, 16 * Math.PI / 180];
    const back = [Math.sin(a) * Math.cos(e), Math.sin(e), Math.cos(a) * Math.cos(e)], right = [Math.cos(a), 0, -Math.sin(a)];
    const up = [back[1] * right[2] - back[2] * right[1], back[2] * right[0] - back[0] * right[2], back[0] * right[1] - back[1] * right[0]];
    const root = this.#joint(frame, 0), middle = [root[0], 0.9, root[2]];
    const dot = (p, q) => p[0] * q[0] + p[1] * q[1] + p[2] * q[2];
    const see = (p) => {
      const v = p.map((x, i) => x - middle[i]), metre = FOCAL / Math.max(NEAR - dot(v, back), 0.1);
      return [side * (0.5 + dot(v, right) * metre), side * (0.5 - dot(v, up) * metre), metre * side];
    };
    pen.strokeStyle = colour("edge");
    pen.lineWidth = 1;
    for (let n = -6; n <= 6; n++) {
      const [x, z] = [Math.round(middle[0] * 2) / 2 + n / 2, Math.round(middle[2] * 2) / 2 + n / 2];
      pen.globalAlpha = 0.45 * (1 - Math.abs(n) / 7);
      for (const [from, to] of [[[x, 0, middle[2] - 3], [x, 0, middle[2] + 3]], [[middle[0] - 3, 0, z], [middle[0] + 3, 0, z]]]) {
        const [p, q] = [see(from), see(to)];
        pen.beginPath(); pen.moveTo(p[0], p[1]); pen.lineTo(q[0], q[1]); pen.stroke();
      }
    }
    pen.globalAlpha = 1;
    const points = this.parents.map((_, j) => see(this.#joint(frame, j))), ink = colour("ink");
    // SMPL: left joints are 1, 4, 7 ..., right ones 2, 5, 8 ... ; the trunk is 0, 3, 6, 9, 12, 15
    const LEFT = [1, 4, 7, 10, 13, 16, 18, 20], RIGHT = [2, 5, 8, 11, 14, 17, 19, 21];
    const bones = this.parents.map((parent, j) => ({ parent, j, depth: points[j][2] })).filter(({ parent }) => parent >= 0);
    bones.sort((p, q) => p.depth - q.depth);
    pen.lineCap = "round";
    for (const { parent, j } of bones) {
      const limb = LEFT.includes(j) ? LIMBS.left : RIGHT.includes(j) ? LIMBS.right : null;
      pen.strokeStyle = limb ? `rgb(${limb.join(" ")})` : ink;
      pen.lineWidth = 0.08 * points[j][2];
      pen.beginPath();
      pen.moveTo(points[parent][0], points[parent][1]);
      pen.lineTo(points[j][0], points[j][1]);
      pen.stroke();
    }
    const head = points[15];
    pen.fillStyle = ink;
    pen.beginPath(); pen.arc(head[0], head[1] - 0.08 * head[2], 0.115 * head[2], 0, 7); pen.fill();
  }
}

class FileView {
  constructor() { this.element = make("div", { class: "medium" }); }
  part() {}
  whole() {}
}

const VIEWS = { image: ImageView, video: ClipView, world: ClipView, action: ClipView, speech: SoundView, audio: SoundView, text: TextView, motion: MotionView };
export const viewOf = (modality, prompt) => new (VIEWS[modality] || FileView)(prompt);
export const isBeside = (modality) => modality === "image";
