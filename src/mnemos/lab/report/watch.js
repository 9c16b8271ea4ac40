"use strict";
// Follows runs that are being trained: asks the server for their state, and puts a new page in place of the old one.
(() => {
  const EVERY = 3000; // milliseconds
  let version = null;

  async function refresh() {
    const text = await (await fetch("./", { cache: "no-store" })).text();
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const old = document.querySelector("main");
    const open = new Set([...old.querySelectorAll("details[open] > section")].map((one) => one.id));
    const focused = document.activeElement?.closest("figure")?.dataset.figure;
    const place = [scrollX, scrollY];
    const main = document.importNode(fresh.querySelector("main"), true);
    for (const one of main.querySelectorAll("details > section")) if (open.has(one.id)) one.parentElement.open = true;
    main.querySelector("#watch").textContent = old.querySelector("#watch").textContent;
    old.replaceWith(main);
    window.mnemosPage.begin(main);
    if (focused) document.querySelector(`figure[data-figure="${CSS.escape(focused)}"] .chart`)?.focus({ preventScroll: true });
    scrollTo(...place);
  }

  async function ask() {
    const status = document.querySelector("#watch");
    try {
      const state = await (await fetch("state", { cache: "no-store" })).json();
      status.textContent = state.text;
      if (version !== null && version !== state.version && !document.hidden) await refresh();
      if (version === null || !document.hidden) version = state.version;
    } catch {
      status.textContent = "the server has ended: this is the last page";
    }
    setTimeout(ask, EVERY);
  }
  ask();
})();
