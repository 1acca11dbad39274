"use strict";
(() => {
  const strips = [...document.querySelectorAll(".chunks")];
  const boxesOf = new Map(strips.map((strip) => [strip, [...strip.querySelectorAll(".chunk")]]));
  const search = document.getElementById("search");
  const found = document.getElementById("found");
  const detail = document.getElementById("detail");
  const range = (box, side) => box.dataset[side].split(" ").map(Number);
  const above = new Map(strips.flatMap((strip) => boxesOf.get(strip).map((box) => [box, range(box, "a")])));
  const overlap = ([a, b], [c, d]) => a < d && c < b;
  const textOf = (side) => (side ? [...side.querySelectorAll("i")].map((i) => i.textContent).join("") : "");

  // Light up both sides of a box, and in the row's other strips the boxes that hold the same tokens above.
  let lit = [];
  function light(box) {
    lit.forEach((side) => side.classList.remove("on"));
    lit = [];
    if (!box) return;
    const strip = box.parentElement;
    const mine = above.get(box);
    for (const other of strips) {
      if (other.dataset.row !== strip.dataset.row) continue;
      for (const each of boxesOf.get(other)) {
        if (each === box || (other !== strip && overlap(above.get(each), mine))) {
          lit.push(...each.querySelectorAll(".side"));
        }
      }
    }
    lit.forEach((side) => side.classList.add("on"));
    const sides = box.querySelectorAll(".side");
    const words = { paired: "", wrong: " — not paired", unused: " — not trained on", alone: "" };
    const state = words[["paired", "wrong", "unused"].find((name) => box.classList.contains(name)) || "alone"];
    const say = (name, side, text) => {
      const [from, to] = range(box, side);
      return `${name} [${from}, ${to}) ${text}`;
    };
    detail.textContent =
      say(strip.dataset.above, "a", textOf(sides[0])) +
      (strip.dataset.below ? `   ↔   ${say(strip.dataset.below, "b", textOf(sides[1]))}` : "") + state;
  }

  let current = null;
  function go(box) {
    if (!box) return;
    if (current) current.tabIndex = -1;
    current = box;
    box.tabIndex = 0;
    box.focus({ preventScroll: true });
    box.scrollIntoView({ block: "nearest" });
  }
  document.addEventListener("mouseover", (event) => {
    const box = event.target.closest && event.target.closest(".chunks .chunk");
    if (box) light(box);
  });
  document.addEventListener("focusin", (event) => {
    const box = event.target.closest(".chunks .chunk");
    if (box) { current = box; light(box); }
  });

  // Down and up: the nearest box on the next line of boxes, wherever that line is.
  const every = strips.flatMap((strip) => boxesOf.get(strip));
  function nextLine(from, step) {
    const home = from.getBoundingClientRect();
    let line = null, best = null, distance = Infinity;
    for (let at = every.indexOf(from) + step; at >= 0 && at < every.length; at += step) {
      const place = every[at].getBoundingClientRect();
      if (line === null) {
        if (Math.abs(place.top - home.top) < 4) continue;
        line = place.top;
      } else if (Math.abs(place.top - line) >= 4) break;
      const away = Math.abs(place.left - home.left);
      if (away < distance) { best = every[at]; distance = away; }
    }
    return best;
  }
  function nextRow(from, step) {
    const row = Number(from.parentElement.dataset.row) + step;
    const strip = strips.find((each) => Number(each.dataset.row) === row);
    return strip && boxesOf.get(strip)[0];
  }

  // Search runs over the joined text of a strip's side, so that a hit may span tokens. O(text), read once.
  let texts = null;
  function readTexts() {
    texts = [];
    for (const strip of strips) {
      for (const side of strip.dataset.below ? [0, 1] : [0]) {
        const ends = [], pieces = [];
        let length = 0;
        for (const box of boxesOf.get(strip)) {
          const piece = textOf(box.querySelectorAll(".side")[side]).toLowerCase();
          pieces.push(piece);
          ends.push(length += piece.length);
        }
        texts.push({ boxes: boxesOf.get(strip), ends, text: pieces.join("") });
      }
    }
  }
  let hits = [], hit = -1;
  function mark() {
    hits.forEach((box) => box.classList.remove("hit"));
    hits = []; hit = -1;
    const wanted = search.value.toLowerCase().replaceAll(" ", "·");
    if (!wanted) { found.textContent = ""; return; }
    if (!texts) readTexts();
    const marked = new Set();
    for (const { boxes, ends, text } of texts) {
      let box = 0;
      for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
        while (ends[box] <= at) box += 1;
        for (let each = box; each < boxes.length && (each === box || ends[each - 1] < at + wanted.length); each += 1) {
          marked.add(boxes[each]);
        }
      }
    }
    hits = every.filter((box) => marked.has(box));
    hits.forEach((box) => box.classList.add("hit"));
    found.textContent = `${hits.length} chunk${hits.length === 1 ? "" : "s"}`;
  }
  function nextHit(step) {
    if (!hits.length) return;
    hit = (hit + step + hits.length) % hits.length;
    hits[hit].scrollIntoView({ block: "center" });
    light(hits[hit]);
    found.textContent = `${hit + 1} of ${hits.length}`;
  }
  search.addEventListener("input", mark);

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === search) {
      if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") { search.value = ""; mark(); go(current || every[0]); }
      else if (event.key === "ArrowDown") go(hits[Math.max(hit, 0)] || current || every[0]);
      else return;
      event.preventDefault();
      return;
    }
    if (event.key === "/") { search.focus(); search.select(); event.preventDefault(); return; }
    const from = current || every[0];
    if (!from) return;
    const at = every.indexOf(from);
    const moves = {
      ArrowRight: () => (current ? every[at + 1] : from), ArrowLeft: () => every[at - 1],
      ArrowDown: () => (current ? nextLine(from, 1) : from), ArrowUp: () => nextLine(from, -1),
      PageDown: () => nextRow(from, 1), PageUp: () => nextRow(from, -1),
      Home: () => boxesOf.get(from.parentElement)[0], End: () => boxesOf.get(from.parentElement).at(-1),
    };
    if (event.key in moves) { go(moves[event.key]()); event.preventDefault(); }
    else if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") light(null);
  });
})();
