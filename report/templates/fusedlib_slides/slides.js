// Arrows turn the slides; text that does not fit its slide is set smaller.
const slides = [...document.querySelectorAll(".slide")];
const flowing = matchMedia("(max-width: 50rem), (max-height: 28rem)");
const STEPS = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1, Home: -Infinity, End: Infinity };
let wanted = 0;

function shown() {
  const tops = slides.map((slide) => Math.abs(slide.getBoundingClientRect().top));
  return tops.indexOf(Math.min(...tops));
}

function show(at, behavior = "auto") {
  wanted = Math.max(0, Math.min(slides.length - 1, at));
  slides[wanted].scrollIntoView({ behavior });
  history.replaceState(null, "", `#${wanted + 1}`);
}

function fit() {
  for (const text of document.querySelectorAll(".text")) {
    text.style.fontSize = "";
    if (flowing.matches) continue;
    const stage = text.closest(".stage");
    const room = () => stage.getBoundingClientRect().bottom - 1.9 * parseFloat(getComputedStyle(stage).fontSize);
    const full = parseFloat(getComputedStyle(text).fontSize);
    for (let size = full; size > full / 2; size *= 0.97) {
      text.style.fontSize = `${size}px`;
      if (text.scrollHeight <= text.clientHeight + 1 && text.getBoundingClientRect().bottom <= room()) break;
    }
  }
}

addEventListener("keydown", (event) => {
  const step = STEPS[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  if (flowing.matches && !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  show(shown() + (event.key === " " && event.shiftKey ? -1 : step));
});
addEventListener("resize", () => { fit(); if (!flowing.matches) show(wanted); });
addEventListener("scrollend", () => { wanted = shown(); });
document.fonts.ready.then(fit);
