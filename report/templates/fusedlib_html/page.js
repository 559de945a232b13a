// The contents mark the section that is being read; on a narrow page they fold into one line.
const contents = document.querySelector("nav details"), narrow = matchMedia("(max-width: 75.99rem)");
const links = [...contents.querySelectorAll("a")];

function follow() {
  const above = (link) => document.getElementById(link.hash.slice(1)).getBoundingClientRect().top < innerHeight / 3;
  const read = links.filter(above).pop() ?? null;
  for (const link of links) link.ariaCurrent = link === read ? "true" : null;
  for (const item of contents.querySelectorAll("li")) item.classList.toggle("here", item.contains(read));
  document.getElementById("here").textContent = narrow.matches && read ? ` · ${read.textContent.trim()}` : "";
}

function fold() { contents.open = !narrow.matches; follow(); }

// A button that copies, on what is code.
for (const code of document.querySelectorAll("pre")) {
  const box = document.createElement("div"), button = document.createElement("button");
  box.className = "copied";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch { getSelection().selectAllChildren(code); button.textContent = "selected"; }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  code.replaceWith(box);
  box.append(code, button);
}

contents.parentElement.classList.add("live");
narrow.addEventListener("change", fold);
contents.addEventListener("click", (event) => { if (event.target.closest("a")) fold(); });
addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
fold();
