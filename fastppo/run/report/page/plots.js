// Draws the charts with uPlot: drag to zoom, double-click to reset, values under the cursor.
// The colors follow the page's light or dark scheme.
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const HEIGHT = 210;  // pixels
// Distances of ticks. Integers have no fractional ticks.
const STEPS = Array.from({length: 25}, (_, i) => [1, 2, 5].map((step) => Number(`${step}e${i - 12}`))).flat();
const WHOLE = STEPS.filter((step) => step >= 1);

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
};

// The values of all curves at the cursor.
function tooltip(chart) {
  const box = document.createElement("div");
  box.className = "tooltip";
  return {
    hooks: {
      init: (plot) => plot.over.appendChild(box),
      setCursor: (plot) => {
        const {idx, left, top} = plot.cursor;
        const rows = idx === null || idx === undefined ? [] : plot.series
          .map((series, i) => [series.label, plot.data[i][idx], i])
          .filter(([, value, i]) => i > 0 && value !== null && value !== undefined);
        box.style.display = rows.length && left >= 0 ? "block" : "none";
        box.replaceChildren();
        const line = (text, tint) => {
          const row = document.createElement("div");
          row.textContent = text;
          if (tint) row.style.setProperty("--tint", tint);
          box.appendChild(row);
        };
        if (!rows.length) return;
        line(`${chart.xlabel} ${number(plot.data[0][idx])}`);
        for (const [label, value, i] of rows) line(`${label}: ${number(value)}`, tint(i - 1));
        const beyond = left > plot.over.clientWidth / 2;
        box.style.left = beyond ? "auto" : `${left + 12}px`;
        box.style.right = beyond ? `${plot.over.clientWidth - left + 12}px` : "auto";
        box.style.top = `${Math.min(top, plot.over.clientHeight - box.clientHeight)}px`;
      },
    },
  };
}

const areWhole = (chart) => chart.series.every((each) =>
  each.right || each.values.every((value) => value === null || Number.isInteger(value)));

const isSingle = (each) => each.values.filter((value) => value !== null).length === 1;

const tint = (i) => color(`--curve-${i % 8}`);

function draw(chart, place) {
  const ink = color("--soft"), grid = {stroke: color("--line"), width: 1};
  const axis = {stroke: ink, grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui"};
  const labels = (_, ticks) => ticks.map(number);
  const series = chart.series.map((each, i) => ({
    label: each.label,
    stroke: tint(i),
    width: 1.6,
    scale: each.right ? "right" : "y",
    spanGaps: Boolean(each.joined),
    points: {show: isSingle(each) || Boolean(each.joined), size: 6, fill: tint(i)},
  }));
  const room = (unit) => ({...axis, values: labels, size: 52, space: 22, label: unit, labelSize: 18, labelGap: 0});
  const axes = [
    {...axis, values: labels, label: chart.xlabel, labelSize: 18, size: 34, incrs: WHOLE},
    {...room(chart.unit), scale: "y", incrs: areWhole(chart) ? WHOLE : STEPS},
  ];
  if (chart.series.some((each) => each.right)) {
    axes.push({...room(chart.unit + ", right"), scale: "right", side: 1, grid: {show: false}});
  }
  // For a single iteration the library would draw a range of a hundred.
  const single = chart.x.length > 1 ? {} : {range: () => [chart.x[0] - 0.5, chart.x[0] + 0.5]};
  const fixed = chart.range === undefined ? {} : {y: {range: () => chart.range}};
  const options = {
    width: place.clientWidth, height: HEIGHT, series: [{label: chart.xlabel}, ...series], axes,
    scales: {x: {time: false, ...single}, ...fixed}, legend: {show: false},
    cursor: {points: {size: 6}, drag: {x: true, y: false}},
    plugins: [tooltip(chart)],
  };
  return new uPlot(options, [chart.x, ...chart.series.map((each) => each.values)], place);
}

// A legend for more than one curve; a click hides a curve.
function legend(chart, place, plot) {
  const list = document.createElement("div");
  list.className = "legend";
  chart.series.forEach((each, i) => {
    const entry = document.createElement("button");
    entry.textContent = each.label + (each.right ? " (right)" : "");
    entry.style.setProperty("--tint", tint(i));
    entry.onclick = () => {
      const shown = plot().series[i + 1].show;
      plot().setSeries(i + 1, {show: !shown});
      entry.classList.toggle("off", shown);
    };
    list.appendChild(entry);
  });
  if (list.childElementCount > 1) place.before(list);
}

const entries = charts.map((chart, i) => {
  const entry = {chart, place: document.getElementById(`chart-${i}`), plot: null};
  legend(chart, entry.place, () => entry.plot);
  return entry;
});

function drawAgain(entry) {
  entry.plot?.destroy();
  entry.plot = draw(entry.chart, entry.place);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  entries.filter(({plot}) => plot).forEach(drawAgain));
// Draw a chart once its section is open, and again when its width changes.
const sized = new ResizeObserver((changes) => requestAnimationFrame(() => {
  for (const {target} of changes) {
    const entry = entries.find(({place}) => place === target);
    const width = target.clientWidth;
    if (width && !entry.plot) drawAgain(entry);
    else if (width && width !== entry.plot.width) entry.plot.setSize({width, height: HEIGHT});
  }
}));
for (const entry of entries) {
  if (entry.place.clientWidth) drawAgain(entry);
  sized.observe(entry.place);
}
