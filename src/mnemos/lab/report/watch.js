"use strict";
// Follows runs that are being trained: asks the server for their state, and puts a new page in place of the old one.
(() => {
  const EVERY = 3000; // milliseconds
  const get = (path) => fetch(path, { cache: "no-store" }).catch(() => null); // null: the server does not answer

  async function refresh() {
    const answer = await get("./");
    if (!answer?.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const old = document.querySelector("main");
    const open = new Set([...old.querySelectorAll("details[open] > section")].map((one) => one.id));
    const focused = document.activeElement?.closest("figure")?.dataset.figure;
    const scroll = [scrollX, scrollY];
    const main = document.importNode(fresh.querySelector("main"), true);
    for (const one of main.querySelectorAll("details > section")) if (open.has(one.id)) one.parentElement.open = true;
    main.querySelector("#watch").textContent = old.querySelector("#watch").textContent;
    window.mnemosPage.end();
    old.replaceWith(main);
    window.mnemosPage.begin(main);
    if (focused) document.querySelector(`figure[data-figure="${CSS.escape(focused)}"] .chart`)?.focus({ preventScroll: true });
    scrollTo(...scroll);
  }

  async function ask() {
    const status = document.querySelector("#watch");
    const answer = await get("state");
    const state = answer?.ok ? await answer.json().catch(() => null) : null;
    if (!answer) status.textContent = "the server does not answer: this is the last page";
    else status.textContent = state ? state.text : `the server cannot read the runs now (error ${answer.status})`;
    // The page says which version of the runs it shows.
    if (state && state.version !== status.dataset.version && !document.hidden) await refresh();
  }
  const follow = () => ask().finally(() => setTimeout(follow, EVERY));
  follow();
})();
