"use strict";
/* Charts in SVG from plain data, with hover, arrow keys and a legend that hides series; colours come from the style sheet.

   spec = {alt, x: {label, min, max}, y: {label, min, max, percent, flag}, series: [...], titles: [...], nearest: "xy"}
   series: {name, kind: "band" | "line" | "dots" | "bars", color, dash, deep, x, y, low, quiet, lead}; a band lies between low and
   y; bars have one more x than y. The cursor walks along the first series of dots, else the first; quiet ones have no value
   to tell, and only with lead can they be walked along. `titles` belong to the first of them. */
const mcbn = (() => {
  const NAMESPACE = (() => {
    const template = document.createElement("template");
    template.innerHTML = "<svg></svg>";
    return template.content.firstChild.namespaceURI;
  })();

  function shape(parent, name, attributes) {
    const node = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (parent) parent.appendChild(node);
    return node;
  }

  function html(parent, name, className, text) {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  /* Round values between low and high, with so many digits that each can be told from the next. */
  function ticks(axis, count) {
    const { min: low, max: high } = axis, rough = (high - low) / Math.max(1, count);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
    const unit = axis.percent ? 100 : 1, largest = unit * Math.max(Math.abs(low), Math.abs(high));
    if (largest >= 1e6 || largest < 1e-3) {
      const digits = Math.max(0, Math.min(20, Math.ceil(Math.log10(largest / (step * unit)))));
      return found.map((value) => [value, value === 0 ? "0" : (unit * value).toExponential(digits) + (axis.percent ? " %" : "")]);
    }
    let digits = 0;
    for (let part = step * unit; digits < 15 && Math.abs(part - Math.round(part)) > 1e-6 * part; part *= 10) digits++;
    const style = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return found.map((value) => [value, (unit * value + 0).toLocaleString("en", style) + (axis.percent ? " %" : "")]);
  }

  function show(value, axis) {
    if (value === null || !Number.isFinite(value)) return "\u2013";
    if (axis && axis.percent) return `${+(100 * value).toPrecision(4)} %`;
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4) return value.toExponential(2);
    return (+value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  /* Index of the value nearest to x in a sorted list. */
  function nearest(sorted, x) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle; else high = middle;
    }
    return x - sorted[low] <= sorted[high] - x ? low : high;
  }

  const at = (value, i) => (Array.isArray(value) ? value[i] : value || 0);

  function chart(holder, first) {
    let spec = first, hidden = new Set(), cursor = null, scale = null, drawn = 0;
    const legend = html(holder, "div", "legend");
    legend.setAttribute("role", "group");
    legend.setAttribute("aria-label", "show or hide");
    const plot = html(holder, "div", "plot");
    const svg = shape(plot, "svg", { tabindex: "0", role: "img" });
    const tip = html(plot, "div", "tip");
    tip.hidden = true;
    const spoken = html(holder, "div", "spoken");
    spoken.setAttribute("aria-live", "polite");

    function drawLegend() {
      legend.textContent = "";
      spec.series.forEach((series, index) => {
        const button = html(legend, "button");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
        const swatch = shape(button, "svg", { viewBox: "0 0 22 12", "aria-hidden": "true" });
        drawSwatch(swatch, series);
        html(button, "span", "", series.name);
        button.addEventListener("click", () => {
          if (!hidden.delete(series.name)) hidden.add(series.name);
          button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
          cursor = null;
          draw();
        });
        button.dataset.series = index;
      });
    }

    function drawSwatch(swatch, series) {
      if (series.kind === "dots") shape(swatch, "circle", { cx: 11, cy: 6, r: 3.5, class: `fill ${series.color}` });
      else if (series.kind === "line")
        shape(swatch, "path", { d: "M1 6H21", class: `line ${series.color} ${series.dash ? "dash" : ""}` });
      else shape(swatch, "rect", { x: 1, y: 1, width: 20, height: 10, class: `${series.kind} ${series.color} ${series.deep ? "deep" : ""}` });
    }

    function draw() {
      const width = Math.max(260, plot.clientWidth || 640);
      const height = spec.height || Math.round(Math.min(400, Math.max(250, width * 0.52)));
      const sides = { x: ticks(spec.x, width / 90), y: ticks(spec.y, height / 55) };
      const longest = Math.max(...sides.y.map(([, text]) => text.length));
      const pad = { left: Math.max(58, 28 + 7 * longest), right: 26, top: 12, bottom: 44 };
      svg.textContent = "";
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("aria-label", spec.alt + " Arrow keys read values.");
      const { x, y } = spec;
      scale = {
        width, height, pad,
        x: (v) => pad.left + ((v - x.min) / (x.max - x.min)) * (width - pad.left - pad.right),
        y: (v) => height - pad.bottom - ((v - y.min) / (y.max - y.min)) * (height - pad.top - pad.bottom),
      };
      drawAxes(sides);
      const clip = `clip-${Math.random().toString(36).slice(2)}`;
      const rect = { x: pad.left, y: pad.top, width: width - pad.left - pad.right, height: height - pad.top - pad.bottom };
      shape(shape(shape(svg, "defs"), "clipPath", { id: clip }), "rect", rect);
      const group = shape(svg, "g", { "clip-path": `url(#${clip})` });
      for (const series of spec.series) if (!hidden.has(series.name)) drawSeries(group, series);
      if (y.flag) drawFlags();
      shape(svg, "g", { class: "cursor" });
      drawn = width;
      if (cursor !== null) point(cursor);
    }

    function drawAxes(sides) {
      const { width, height, pad } = scale;
      for (const [value, words] of sides.y) {
        const place = scale.y(value);
        shape(svg, "path", { d: `M${pad.left} ${place}H${width - pad.right}`, class: "grid" });
        const text = shape(svg, "text", { x: pad.left - 7, y: place + 4, "text-anchor": "end" });
        text.textContent = words;
      }
      for (const [value, words] of sides.x) {
        const place = scale.x(value);
        shape(svg, "path", { d: `M${place} ${height - pad.bottom}v5`, class: "axis" });
        const text = shape(svg, "text", { x: place, y: height - pad.bottom + 18, "text-anchor": "middle" });
        text.textContent = words;
      }
      shape(svg, "path", { d: `M${pad.left} ${height - pad.bottom}H${width - pad.right}`, class: "axis" });
      const label = shape(svg, "text", { x: (pad.left + width - pad.right) / 2, y: height - 6, "text-anchor": "middle" });
      label.textContent = spec.x.label;
      const middle = (pad.top + height - pad.bottom) / 2;
      const side = shape(svg, "text", { transform: `translate(12 ${middle}) rotate(-90)`, "text-anchor": "middle" });
      side.textContent = spec.y.label;
    }

    const spot = (series, i, value) => `${scale.x(series.x[i]).toFixed(1)} ${scale.y(value).toFixed(1)}`;

    function drawSeries(group, series) {
      const { x, y } = series, n = y.length;
      let path = "";
      if (series.kind === "bars") {
        for (let i = 0; i < n; i++) {
          const left = scale.x(x[i]) + 0.5, right = scale.x(x[i + 1]) - 0.5;
          if (y[i] > 0) path += `M${left} ${scale.y(0)}V${scale.y(y[i])}H${right}V${scale.y(0)}Z`;
        }
      } else if (series.kind === "dots") {
        for (let i = 0; i < n; i++) if (y[i] !== null && y[i] <= spec.y.max) path += `M${spot(series, i, y[i])}h0`;
      } else {
        let pen = "M";
        for (let i = 0; i < n; i++) {
          if (y[i] === null) { pen = "M"; continue; }
          path += pen + spot(series, i, y[i]);
          pen = "L";
        }
        if (series.kind === "band") {
          for (let i = n - 1; i >= 0; i--) path += "L" + spot(series, i, at(series.low, i));
          path += "Z";
        }
      }
      const size = series.kind === "dots" ? { "stroke-width": Math.max(2.2, Math.min(6, 60 / Math.sqrt(n))) } : {};
      shape(group, "path", { d: path, class: `${series.kind} ${series.color} ${series.dash ? "dash" : ""} ${series.deep ? "deep" : ""}`, ...size });
    }

    /* Errors above the axis are marked at its top. */
    function drawFlags() {
      const dots = spec.series.find((series) => series.kind === "dots");
      if (!dots || hidden.has(dots.name)) return;
      const top = scale.pad.top + 1;
      let path = "", count = 0;
      dots.y.forEach((value, i) => {
        if (value > spec.y.max) { path += `M${scale.x(dots.x[i]) - 4} ${top + 7}l4 -7l4 7Z`; count++; }
      });
      if (!count) return;
      shape(svg, "path", { d: path, class: "fill ink" });
      const text = shape(svg, "text", { x: scale.pad.left + 6, y: top + 22 });
      text.textContent = `${count} above the axis, largest ${show(Math.max(...dots.y), spec.y)}`;
    }

    function leader() {
      const visible = spec.series.filter((series) => !hidden.has(series.name) && (!series.quiet || series.lead) && series.y.length);
      return visible.find((series) => series.kind === "dots") || visible[0];
    }

    const centre = (series, i) => (series.kind === "bars" ? (series.x[i] + series.x[i + 1]) / 2 : series.x[i]);

    function point(index) {
      const series = leader();
      if (!series) return leave();
      cursor = Math.max(0, Math.min(series.y.length - 1, index));
      const x = centre(series, cursor), lines = [];
      const title = spec.titles && spec.titles.length === series.y.length ? spec.titles[cursor] : `${spec.x.label}: ${show(x, spec.x)}`;
      for (const other of spec.series) {
        if (hidden.has(other.name) || other.quiet) continue;
        const i = other === series ? cursor : nearest(other.kind === "bars" ? other.x.slice(0, -1) : other.x, x);
        const value = other.kind === "bars" && other !== series ? other.y[cursor] : other.y[i];
        const low = other.kind === "band" && Array.isArray(other.low) ? `${show(other.low[i], spec.y)} to ` : "";
        lines.push(`${other.name}: ${low}${show(value, spec.y)}`);
      }
      const layer = svg.querySelector(".cursor");
      layer.textContent = "";
      const place = scale.x(x), up = scale.y(Math.min(spec.y.max, series.y[cursor] ?? spec.y.min));
      shape(layer, "path", { d: `M${place} ${scale.pad.top}V${scale.height - scale.pad.bottom}`, class: "rule" });
      shape(layer, "circle", { cx: place, cy: up, r: 4.5, class: "ring" });
      tip.textContent = "";
      html(tip, "strong", "", title);
      for (const line of lines) html(tip, "div", "", line);
      tip.hidden = false;
      const ratio = plot.clientWidth / scale.width;
      const left = place * ratio + 12, room = plot.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, left > room ? place * ratio - tip.offsetWidth - 12 : left)}px`;
      tip.style.top = `${Math.max(0, Math.min(up * ratio - 10, svg.clientHeight - tip.offsetHeight))}px`;
      return [title, ...lines].join("; ");
    }

    function leave() {
      cursor = null;
      tip.hidden = true;
      const layer = svg.querySelector(".cursor");
      if (layer) layer.textContent = "";
    }

    function position(event) {
      const box = svg.getBoundingClientRect(), ratio = scale.width / box.width;
      const px = (event.clientX - box.left) * ratio, py = (event.clientY - box.top) * ratio;
      const { pad, width, height } = scale, { x, y } = spec;
      return {
        px, py,
        x: x.min + ((px - pad.left) / (width - pad.left - pad.right)) * (x.max - x.min),
        y: y.min + ((height - pad.bottom - py) / (height - pad.top - pad.bottom)) * (y.max - y.min),
      };
    }

    function seek(event) {
      const series = leader();
      if (!series) return leave();
      const where = position(event);
      let index = nearest(series.kind === "bars" ? series.x.slice(0, -1).map((_, i) => centre(series, i)) : series.x, where.x);
      if (spec.nearest === "xy") {
        let best = Infinity;
        const reach = Math.ceil((16 * series.x.length) / scale.width) + 4, from = Math.max(0, index - reach);
        for (let i = from; i < Math.min(series.y.length, index + reach); i++) {
          const distance = Math.hypot(scale.x(series.x[i]) - where.px, scale.y(Math.min(spec.y.max, series.y[i])) - where.py);
          if (distance < best) { best = distance; index = i; }
        }
      }
      point(index);
    }

    svg.addEventListener("pointermove", seek);
    svg.addEventListener("pointerdown", seek);
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const series = leader();
      if (!series) return;
      const stride = event.shiftKey ? Math.max(1, Math.round(series.y.length / 20)) : 1, last = series.y.length - 1;
      const moves = { ArrowRight: (cursor ?? -1) + stride, ArrowLeft: (cursor ?? last + 1) - stride, Home: 0, End: last };
      if (event.key === "Escape") leave();
      else if (event.key in moves) { spoken.textContent = point(moves[event.key]); event.preventDefault(); }
    });
    new ResizeObserver(() => { if (Math.abs(plot.clientWidth - drawn) > 4) draw(); }).observe(plot);
    drawLegend();
    draw();
    return { svg, position, update(next) {
      const names = (some) => some.series.map((series) => series.name).join();
      const changed = names(next) !== names(spec);
      spec = next;
      if (changed) drawLegend();
      draw();
    } };
  }

  /* Click or Enter on a column heading sorts its table by it. */
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        rows.sort((a, b) => compare(key(a), key(b), down));
        table.tBodies[0].append(...rows);
      });
    });
  }

  /* Numbers before text; what is missing stays last either way. */
  function compare(a, b, down) {
    if (a === "" || b === "" || a === "\u2013" || b === "\u2013") return (a === "" || a === "\u2013") - (b === "" || b === "\u2013");
    const [x, y] = [a, b].map((text) => Number(text.replace(/[%,\s]/g, "")));
    const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en") : x - y;
    return down ? -order : order;
  }

  function themes() {
    const button = document.getElementById("theme");
    if (!button) return;
    button.addEventListener("click", () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
    });
  }

  function start() {
    for (const holder of document.querySelectorAll("[data-chart]"))
      chart(holder, JSON.parse(document.getElementById(holder.dataset.chart).textContent));
    document.querySelectorAll("table.sortable").forEach(sortable);
    themes();
  }

  return { chart, start, html };
})();
mcbn.start();
