// Live parts pause while the page is hidden, and while somebody reads with the keyboard in them.
document.addEventListener("htmx:beforeRequest", (event) => {
  const target = event.detail.elt;
  if (document.hidden || target.contains(document.activeElement)) event.preventDefault();
});
