// Two answers side by side, with the first word that differs marked in both.

import { h } from "./dom.js";

/** The answers beside each other; below each other where it is narrow. */
export const compared = (shown) => h("div", { class: "compared" }, ...shown);

/** Words of a text with their places: [word, start, end]. */
function words(text) {
  return [...text.matchAll(/\S+/g)].map((found) => [found[0], found.index, found.index + found[0].length]);
}

/** Number of the first word that differs; null while none does. The last word may still grow. */
export function firstDifference(left, right, isDone) {
  const most = Math.max(left.length, right.length);
  for (let place = 0; place < most; place += 1) {
    const [a, b] = [left[place], right[place]];
    const known = (list, done) => place < list.length - 1 || done;
    if (!known(left, isDone[0]) || !known(right, isDone[1])) return null;
    if (a?.[0] !== b?.[0]) return place;
  }
  return null;
}

/** Marks the difference in what is shown of both answers, and says where it is. */
export function markDifference(answers, views) {
  const lists = views.map(({ text }) => {
    for (const mark of text.querySelectorAll("mark")) mark.replaceWith(...mark.childNodes);
    text.normalize();
    return words(text.textContent);
  });
  const done = answers.map(({ state }) => state !== "running");
  const place = firstDifference(...lists, done);
  views.forEach(({ text, note }, side) => {
    const word = place === null ? null : lists[side][place];
    if (word) mark(text, word[1], word[2]);
    note.hidden = place === null && !done.every(Boolean);
    note.textContent = said(place, word, lists[side]);
  });
}

function said(place, word, list) {
  if (place === null) return `Both answers are the same, ${list.length} words.`;
  if (!word) return `The first difference: this answer ends after ${place} words.`;
  return `The first difference is word ${place + 1}: “${word[0]}”.`;
}

function mark(element, start, end) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let before = 0;
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const from = Math.max(start - before, 0);
    const to = Math.min(end - before, node.data.length);
    if (from < to) found.push([node, from, to]);
    before += node.data.length;
  }
  for (const [node, from, to] of found) {
    const part = node.splitText(from);
    part.splitText(to - from);
    const wrapped = h("mark", { class: "differs" });
    part.replaceWith(wrapped);
    wrapped.append(part);
  }
}
