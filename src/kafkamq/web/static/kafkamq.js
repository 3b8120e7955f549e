/* Where a page is made again, the reader stays: focus, what was scrolled, text that is selected, boxes that are checked. */
"use strict";
(() => {
  const live = () => document.getElementById("live");
  const scrolled = () => [...live().querySelectorAll(".scroll, pre")];
  const name = (each) => each.getAttribute("href") ?? `${each.form?.getAttribute("action")} ${each.textContent} ${each.value}`;
  let focused = null;
  let places = [];
  document.addEventListener("htmx:beforeSwap", (event) => {
    const selection = document.getSelection();
    const isSelected = !selection.isCollapsed && live().contains(selection.anchorNode);
    if (isSelected || live().querySelector(":checked")) {
      event.detail.shouldSwap = false;
      return;
    }
    const at = document.activeElement;
    focused = live().contains(at) ? [name(at), scrolled().indexOf(at)] : null;
    places = scrolled().map((each) => [each.scrollLeft, each.scrollTop]);
  });
  document.addEventListener("htmx:afterSwap", () => {
    scrolled().forEach((each, number) => each.scrollTo(...(places[number] ?? [0, 0])));
    if (focused === null) return;
    const [wanted, number] = focused;
    const same = (each) => name(each) === wanted;
    const found = number < 0 ? [...live().querySelectorAll("a, button, input")].find(same) : scrolled()[number];
    found?.focus({ preventScroll: true });
  });
})();
