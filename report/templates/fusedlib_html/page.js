// The contents mark the section that is being read; on a narrow page they fold into one line.
const contents = document.querySelector("nav details");
const links = [...contents.querySelectorAll("a")];
const heads = links.map((link) => document.getElementById(link.hash.slice(1)));
const narrow = matchMedia("(max-width: 75.99rem)");

function fold() { contents.open = !narrow.matches; }

function follow() {
  let at = -1;
  heads.forEach((head, i) => { if (head.getBoundingClientRect().top < innerHeight / 3) at = i; });
  links.forEach((link, i) => {
    if (i === at) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  });
  for (const item of contents.querySelectorAll("li")) {
    item.classList.toggle("here", item.contains(links[at] ?? null));
  }
  const current = at < 0 ? "" : links[at].textContent.trim();
  document.getElementById("here").textContent = narrow.matches && current ? ` · ${current}` : "";
}

function measure() {
  for (const box of document.querySelectorAll(".scroll, .pane")) {
    box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1);
  }
}

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
document.addEventListener("change", (event) => { if (event.target.closest(".tabs")) measure(); });

contents.parentElement.classList.add("live");
narrow.addEventListener("change", fold);
contents.addEventListener("click", (event) => { if (narrow.matches && event.target.closest("a")) contents.open = false; });
addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
addEventListener("resize", () => { measure(); follow(); });
fold();
follow();
measure();
