"use strict";
// Draws the charts of a page again, with values and switches, and makes its tables sortable. See charts.py.
(() => {
  const MOST_VALUES = 8; // beside a chart
  const ROW = 26; // pixels of a variant in a strip

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size && size < 1e-4)) return value.toPrecision(3);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 15 : 4, maximumFractionDigits: 4 });
  };
  const make = (tag, name, ...children) => {
    const element = document.createElement(tag);
    element.className = name;
    element.append(...children);
    return element;
  };
  const nearest = (list, distance) => list.reduce((best, one, i) => (distance(one) < distance(list[best]) ? i : best), 0);
  const distinct = (values) => [...new Set(values)].sort((a, b) => a - b);

  // One panel. What is read are the values at one of `places`: x of the points, or the variant of a strip.
  class Chart {
    constructor(element, figure) {
      Object.assign(this, { element, figure }, JSON.parse(element.querySelector(".chart-data").textContent));
      this.strip = this.mode === "strip";
      const names = Object.keys(this.columns);
      this.points = this.columns.s.map((s, i) => {
        const point = Object.fromEntries(names.map((name) => [name, this.columns[name][i]]));
        return this.strip ? { ...point, name: this.series[s].name } : point;
      });
      this.picture = make("div", "picture");
      this.overlay = make("div", "overlay");
      this.overlay.setAttribute("aria-hidden", "true");
      this.readout = make("p", "readout");
      this.readout.setAttribute("role", "status");
      const still = element.querySelector("svg");
      still.replaceWith(this.picture);
      this.picture.append(still);
      element.append(this.overlay);
      element.after(this.readout);
      element.tabIndex = 0;
      element.setAttribute("aria-label", `${element.getAttribute("aria-label")}. Arrow keys read the values.`);
      element.addEventListener("keydown", (event) => this.key(event));
      element.addEventListener("pointermove", (event) => this.point(event));
      element.addEventListener("pointerleave", () => this.leave());
      element.addEventListener("blur", () => this.leave());
      element.addEventListener("focus", () => this.move(0));
      this.leave();
    }

    get axis() {
      return Math.max(0, this.axes.findIndex((axis) => axis.name === this.figure.state.axis));
    }

    async draw() {
      const { variants, seeds, logX, logY } = this.figure.state;
      const place = this.axis;
      const axis = this.axes[place];
      this.x = `x${place}`;
      const shown = this.points.filter(
        (one) =>
          !variants.has(this.series[one.s].name) &&
          !(seeds.has(this.runs[one.r]) && this.runs.length > 1) &&
          one[this.x] !== null &&
          (!logX || one[this.x] > 0) &&
          (!logY || one.y === null || one.y > 0),
      );

      // The specification, on the axis and the scales that were chosen.
      const spec = structuredClone(this.spec);
      spec.layer = spec.layer.filter(({ encoding: { x, y } }) => !(logX && x?.datum <= 0) && !(logY && y?.datum <= 0));
      for (const { encoding: { x, y } } of spec.layer) {
        if (x?.field) {
          Object.assign(x, { field: this.x, title: axis.name });
          x.axis.format = axis.form;
          x.scale.type = logX ? "log" : "linear";
          if (logX) delete x.scale.zero;
          else x.scale.zero = false;
          if (place > 0) delete x.axis.values;
          else if (logX && x.axis.values) x.scale.base = 2;
        }
        if (logY && y?.scale) {
          y.scale.type = "log";
          delete y.scale.zero;
          delete y.scale.domain;
        }
      }
      spec.data = { values: shown.map((one) => ({ ...one })) };
      if (this.strip) spec.height = ROW * Math.max(1, new Set(shown.map((one) => one.s)).size);
      spec.width = Math.max(160, this.element.clientWidth);
      spec.autosize = { type: "fit-x", contains: "padding" };

      const drawing = (this.drawing = (this.drawing || 0) + 1);
      const holder = document.createElement("div");
      const options = { renderer: "svg", actions: false, ast: true, tooltip: false, logLevel: 1 };
      const { view, finalize } = await vegaEmbed(holder, spec, options);
      if (drawing !== this.drawing) return finalize(); // another one began meanwhile
      this.finalize?.();
      this.picture.replaceChildren(holder);
      Object.assign(this, { view, finalize, width: this.element.clientWidth });
      this.lines = new Map(); // the points of each variant and run, by x
      for (const one of shown.sort((a, b) => a[this.x] - b[this.x])) {
        const name = `${one.s} ${one.r}`;
        this.lines.set(name, [...(this.lines.get(name) ?? []), one]);
      }
      this.places = distinct(shown.map((one) => (this.strip ? one.s : one[this.x])));
      this.at = Math.min(this.at ?? 0, Math.max(0, this.places.length - 1));
      this.element.dataset.drawn = drawing;
      if (document.activeElement === this.element) this.show();
      else this.leave();
    }

    // The values of the variants at a place.
    values(place) {
      const points = new Map(); // by variant
      for (const line of this.lines.values()) {
        const near = line[nearest(line, (one) => Math.abs(one[this.x] - place))];
        const beyond = place < line[0][this.x] || place > line.at(-1)[this.x];
        if (this.strip ? line[0].s !== place : beyond || (this.mode === "marks" && near[this.x] !== place)) continue;
        points.set(near.s, [...(points.get(near.s) ?? []), ...(this.strip ? line : [near])]);
      }
      const name = this.strip ? "x0" : "y";
      return [...points].map(([series, all]) => {
        const known = all.filter((one) => one[name] !== null);
        const values = known.map((one) => one[name]);
        const ends = all.length === 1 && "low" in all[0] ? [all[0].low, all[0].high] : values;
        const mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
        const least = Math.min(...ends), most = Math.max(...ends);
        let text = `${this.series[series].name} ${number(mean)}`;
        if (this.strip && known.length > 1) {
          const each = known.map((one) => `${this.runs[one.r]}: ${number(one[name])}`);
          text = `${this.series[series].name}: mean ${number(mean)}; ${each.join("; ")}`;
        } else if (most > least) text += ` (${number(least)} to ${number(most)})`;
        return { text, mean, x: all[0][this.x], colour: this.series[series].colour };
      });
    }

    // Says and marks the values at `at`. near: of many, those around this value of y; else around the one chosen by keys.
    show(near = null) {
      if (!this.view || !this.places.length) return;
      const place = this.places[this.at];
      const all = this.values(place);
      if (!this.strip) all.sort((a, b) => b.mean - a.mean);
      this.mark(place, all);
      this.readout.textContent = "";
      if (!this.strip) this.say(`${this.axes[this.axis].name} ${number(place)}`);
      let first = 0;
      if (all.length > MOST_VALUES) {
        if (near !== null) this.line = nearest(all, (one) => Math.abs(one.mean - near));
        this.line = Math.max(0, Math.min(all.length - 1, this.line ?? 0));
        first = Math.max(0, Math.min(all.length - MOST_VALUES, this.line - MOST_VALUES / 2));
      }
      for (const one of all.slice(first, first + MOST_VALUES)) this.say(one.text, one.colour);
      if (all.length > MOST_VALUES) this.say(`${all.length - MOST_VALUES} more: up and down`);
    }

    say(text, colour) {
      const dot = make("i", "dot");
      dot.style.color = colour;
      this.readout.append(make("span", "", ...(colour ? [dot] : []), text), " ");
    }

    // The upper left of the plot in the element.
    corner() {
      const [left, top] = this.view.origin();
      const padding = this.view.padding();
      return [left + padding.left, top + padding.top];
    }

    // The middle of a strip's row in the plot.
    row(series) {
      const scale = this.view.scale("y");
      return scale(this.series[series].name) + scale.bandwidth() / 2;
    }

    mark(place, values) {
      const [left, top] = this.corner();
      const rule = make("div", this.strip ? "rule across" : "rule");
      const pixels = (x, y, more) => ({ left: `${left + x}px`, top: `${top + y}px`, ...more });
      this.overlay.replaceChildren(rule);
      if (this.strip) return Object.assign(rule.style, pixels(0, this.row(place), { width: `${this.view.width()}px` }));
      const x = this.view.scale("x"), y = this.view.scale("y");
      Object.assign(rule.style, pixels(x(place), 0, { height: `${this.view.height()}px` }));
      for (const one of values.filter((one) => one.mean !== null)) {
        const dot = make("i", "");
        Object.assign(dot.style, pixels(x(one.x), y(one.mean), { color: one.colour }));
        this.overlay.append(dot);
      }
    }

    leave() {
      if (document.activeElement === this.element) return;
      this.overlay.replaceChildren();
      this.readout.replaceChildren(make("span", "hint", "point at the chart, or focus it and use the arrow keys"));
    }

    point(event) {
      if (!this.view || !this.places.length) return;
      const box = this.element.getBoundingClientRect();
      const [left, top] = this.corner();
      const x = event.clientX - box.left - left, y = event.clientY - box.top - top;
      const scale = this.view.scale("x");
      const distance = this.strip ? (series) => Math.abs(this.row(series) - y) : (one) => Math.abs(scale(one) - x);
      this.at = nearest(this.places, distance);
      this.show(this.strip ? null : this.view.scale("y").invert(y));
    }

    key(event) {
      const far = Math.max(1, Math.round((this.places?.length ?? 0) / 10));
      const along = this.strip ? { ArrowUp: -1, ArrowDown: 1 } : {};
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity, ...along };
      if (event.key in steps) this.move(steps[event.key]);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        this.line = (this.line ?? 0) + (event.key === "ArrowDown" ? 1 : -1);
        this.show();
      } else if (event.key === "Escape") this.element.blur();
      else return;
      event.preventDefault();
    }

    move(by) {
      if (!this.view) return;
      this.at = Math.max(0, Math.min(this.places.length - 1, (this.at ?? 0) + by));
      this.show();
    }
  }

  // A figure: charts that are switched together.
  class Figure {
    constructor(element) {
      this.element = element;
      this.state = { variants: new Set(), seeds: new Set(), axis: null, logX: this.box("log-x")?.checked, logY: false };
      this.charts = [...element.querySelectorAll(".chart")].map((one) => new Chart(one, this));
      for (const hidden of element.querySelectorAll(".switch[hidden], input[hidden]")) hidden.hidden = false;
      element.classList.add("live");

      // Sets hold what is switched off.
      const boxes = (kind) => [...element.querySelectorAll(`input.${kind}`)];
      const toggle = (off, box) => (box.checked ? off.delete(box.value) : off.add(box.value));
      for (const [kind, off] of [["variant", this.state.variants], ["seed", this.state.seeds]])
        for (const box of boxes(kind)) {
          box.checked = true;
          box.addEventListener("change", () => (toggle(off, box), this.draw()));
        }
      for (const [kind, on] of [["all", true], ["none", false]])
        this.box(kind)?.addEventListener("click", () => {
          for (const box of boxes("variant")) (box.checked = on), toggle(this.state.variants, box);
          this.draw();
        });
      for (const [kind, key] of [["log-x", "logX"], ["log-y", "logY"]])
        for (const box of boxes(kind)) {
          box.checked = this.state[key];
          box.addEventListener("change", () => ((this.state[key] = box.checked), this.draw()));
        }
      const axis = this.box("axis");
      axis?.addEventListener("change", () => ((this.state.axis = axis.value), this.draw()));
      this.box("csv").addEventListener("click", () => this.download());

      // A figure is drawn when it comes into sight, and again when its width changes.
      const seen = new IntersectionObserver((entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        seen.disconnect();
        this.draw();
      }, { rootMargin: "200px" });
      let waiting;
      const other = (chart) => chart.view && chart.element.clientWidth && chart.width !== chart.element.clientWidth;
      const resized = new ResizeObserver(() => {
        clearTimeout(waiting);
        waiting = setTimeout(() => this.charts.some(other) && this.draw(), 150);
      });
      for (const one of [seen, resized]) one.observe(element);
    }

    box(kind) {
      return this.element.querySelector(`.${kind}`);
    }

    draw() {
      return Promise.all(this.charts.map((chart) => chart.draw()));
    }

    // Saves every point of the figure's charts as CSV.
    download() {
      const cell = (value) => {
        if (value === null || value === undefined) return "";
        // A text that a spreadsheet would run as a formula begins with an apostrophe.
        const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
        return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      };
      const axes = [...new Set(this.charts.flatMap((chart) => chart.axes.map((axis) => axis.name)))];
      const values = this.charts.every((chart) => chart.strip) ? [] : ["y", "low", "high"]; // a strip has x alone
      const lines = [["chart", "variant", "run", ...axes, ...values.map((name) => (name === "y" ? "value" : name))]];
      for (const chart of this.charts)
        for (const point of chart.points) {
          const x = axes.map((name) => point[`x${chart.axes.findIndex((axis) => axis.name === name)}`]);
          const names = [chart.title || chart.slug, chart.series[point.s].name, chart.runs[point.r]];
          lines.push([...names, ...x, ...values.map((name) => point[name])]);
        }
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.map((line) => line.map(cell).join(",")).join("\r\n")], { type: "text/csv" }));
      link.download = `${this.element.dataset.figure}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }
  }

  const UNITS = { K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, min: 60, h: 3600 };

  // The number at the beginning of a cell, such as 1.2 MiB or 2 min 03 s; NaN without one.
  function quantity(text) {
    const plain = text.replaceAll("−", "-").replaceAll(",", "").replace("<", "").trim();
    const first = /^([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)/.exec(plain);
    if (!first) return NaN;
    const more = plain.slice(first[0].length).matchAll(/^\s+(\d+) (min|s)/g);
    return [...more].reduce((sum, [, n, unit]) => sum + n * (UNITS[unit] ?? 1), Number(first[1]) * (UNITS[first[2]] ?? 1));
  }

  // Heads of a table become buttons that sort it; rows without a number stay behind those with one.
  function sortable(table) {
    const body = table.tBodies[0];
    if (!table.tHead || body.rows.length < 2 || table.matches(".examples, .texts")) return;
    const heads = [...table.tHead.rows[0].cells].filter((head) => head.textContent);
    for (const head of heads) {
      const button = make("button", "", ...head.childNodes);
      button.type = "button";
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        const rows = [...body.rows].map((row) => ({ row, text: row.cells[head.cellIndex].textContent }));
        for (const one of rows) one.value = head.cellIndex ? quantity(one.text) : NaN;
        const numbers = rows.some((one) => !Number.isNaN(one.value));
        const last = numbers ? rows.filter((one) => Number.isNaN(one.value)) : [];
        const order = (a, b) => (numbers ? a.value - b.value : a.text.localeCompare(b.text, "en", { numeric: true }));
        const sorted = rows.filter((one) => !last.includes(one)).sort((a, b) => (down ? order(a, b) : order(b, a)));
        body.append(...[...sorted, ...last].map((one) => one.row));
      });
    }
  }

  for (const one of document.querySelectorAll("figure.charts")) new Figure(one);
  for (const table of document.querySelectorAll("table")) sortable(table);
  const fold = document.querySelector(".fold");
  if (fold) fold.hidden = false;
  fold?.addEventListener("click", () => {
    const sections = [...document.querySelectorAll("details.section")];
    const open = sections.some((one) => !one.open);
    for (const one of sections) one.open = open;
    fold.textContent = open ? "close all sections" : "open all sections";
  });

  // Sections that are closed would not be printed.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.section:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });
})();
