// Paper is light whatever the screen is.
(() => {
  const { dataset } = document.documentElement;
  let theme;
  window.addEventListener("beforeprint", () => {
    theme = dataset.theme;
    dataset.theme = "light";
  });
  window.addEventListener("afterprint", () => {
    dataset.theme = theme;
  });
})();
