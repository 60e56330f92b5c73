// Making elements. Text goes in as text: nothing from a model is ever read as markup.

const SVG = 'http://www.w3.org/2000/svg';

/** An element with attributes and children; a string child is a text node, and null is left out. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value.toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits});
const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

/** What stands for a status, beside its colour. */
const MARKS = {fused: '✓', lowered: '✓', merged: '⤵', declined: '✕'};
