// A mask painted over an image, in cells of tokens: white is made anew. Pointer and keyboard alike.

import { colour, fitted, make, newId, repainted } from "./dom.js";

export class MaskPainter {
  // image: loaded; cells: [rows, columns]; changed: called when the mask changes
  constructor(image, cells, changed) {
    this.image = image;
    [this.rows, this.columns] = cells;
    this.marked = new Array(this.rows * this.columns).fill(false);
    this.cursor = [this.rows >> 1, this.columns >> 1];
    this.brush = 2;
    this.changed = changed;
    const help = newId("help");
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "mask", "aria-describedby": help });
    this.canvas.style.aspectRatio = `${image.naturalWidth} / ${image.naturalHeight}`;
    this.output = make("output", { class: "note" });
    this.size = make("select", { "aria-label": "size of the brush" }, ...[1, 2, 3, 4].map((n) => make("option", { value: n, selected: n === 2 }, n === 1 ? "1 cell" : `${n} cells`)));
    this.size.addEventListener("change", () => { this.brush = +this.size.value; this.paint(); });
    const button = (words, work) => make("button", { type: "button", onclick: () => { work(); this.#tell(); } }, words);
    this.element = make("div", { class: "painter" }, this.canvas,
      make("p", { class: "note", id: help }, "Paint what is made anew. With the keyboard: arrows move, space paints, Delete clears."),
      make("div", { class: "actions" }, this.size,
        button("Clear", () => this.marked.fill(false)),
        button("Invert", () => this.marked.forEach((on, i) => { this.marked[i] = !on; }))),
      this.output);
    this.#listen();
    repainted(this.canvas, () => this.paint());
    this.#tell();
  }

  get isEmpty() { return !this.marked.some(Boolean); }

  #listen() {
    const { canvas } = this;
    const cellAt = (event) => {
      const box = canvas.getBoundingClientRect();
      return [Math.floor((event.clientY - box.top) / box.height * this.rows), Math.floor((event.clientX - box.left) / box.width * this.columns)];
    };
    let on = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.cursor = cellAt(event);
      on = !this.#at(...this.cursor);
      this.#mark(on);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (on === null) return;
      this.cursor = cellAt(event);
      this.#mark(on);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { on = null; });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (move) {
        this.cursor = [Math.min(this.rows - 1, Math.max(0, this.cursor[0] + move[0])), Math.min(this.columns - 1, Math.max(0, this.cursor[1] + move[1]))];
        if (event.shiftKey) this.#mark(true);
        this.paint();
      } else if (event.key === " ") this.#mark(true);
      else if (event.key === "Delete" || event.key === "Backspace") this.#mark(false);
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("focus", () => this.paint());
    canvas.addEventListener("blur", () => this.paint());
  }

  #at(row, column) { return this.marked[row * this.columns + column]; }

  #mark(on) {
    const first = -Math.floor((this.brush - 1) / 2);
    for (let dy = first; dy < first + this.brush; dy++) {
      for (let dx = first; dx < first + this.brush; dx++) {
        const [row, column] = [this.cursor[0] + dy, this.cursor[1] + dx];
        if (row >= 0 && row < this.rows && column >= 0 && column < this.columns) this.marked[row * this.columns + column] = on;
      }
    }
    this.#tell();
  }

  #tell() {
    const count = this.marked.filter(Boolean).length;
    this.output.textContent = count ? `${count} of ${this.marked.length} cells are made anew` : "nothing is painted yet";
    this.canvas.setAttribute("aria-label", `mask over the image: ${this.output.textContent}`);
    this.paint();
    this.changed();
  }

  paint() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    const pen = fitted(this.canvas, width, height), [w, h] = [width / this.columns, height / this.rows];
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.image, 0, 0, width, height);
    this.marked.forEach((on, i) => {
      if (!on) return;
      const [x, y] = [i % this.columns * w, Math.floor(i / this.columns) * h];
      pen.fillStyle = "rgb(255 255 255 / .78)";
      pen.fillRect(x, y, w, h);
      pen.strokeStyle = "rgb(0 0 0 / .35)";
      pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    });
    if (document.activeElement !== this.canvas) return;
    const first = -Math.floor((this.brush - 1) / 2);
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 2;
    pen.strokeRect((this.cursor[1] + first) * w, (this.cursor[0] + first) * h, w * this.brush, h * this.brush);
  }

  // The mask as a PNG of the image's size.
  async file() {
    const canvas = make("canvas");
    [canvas.width, canvas.height] = [this.image.naturalWidth, this.image.naturalHeight];
    const pen = canvas.getContext("2d"), [w, h] = [canvas.width / this.columns, canvas.height / this.rows];
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = "#fff";
    this.marked.forEach((on, i) => { if (on) pen.fillRect(i % this.columns * w, Math.floor(i / this.columns) * h, w, h); });
    return { name: "mask.png", type: "image/png", data: canvas.toDataURL("image/png").split(",")[1] };
  }
}
