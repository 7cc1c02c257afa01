"use strict";

// The images of the next message: pasted, dropped or chosen, shown below its text.
const images = (() => {
  const TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp"];
  const MOST_BYTES = 1 << 20;
  const MOST_PIXELS = 2048; // of a side of an image that is larger in bytes
  let urls = [];
  let reading = 0;
  let report = () => {};

  function asUrl(file) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result));
      reader.addEventListener("error", () => reject(reader.error));
      reader.readAsDataURL(file);
    });
  }

  // Photos would soon be larger than a request may be; servers read few types.
  function shrunk(bitmap) {
    const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // JPEG has no transparency
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", 0.9);
  }

  async function add(files) {
    reading += 1;
    for (const file of files) {
      try {
        const bitmap = await createImageBitmap(file); // fails for what is no image
        const isPlain = TYPES.includes(file.type) && file.size <= MOST_BYTES;
        urls.push(isPlain ? await asUrl(file) : shrunk(bitmap));
      } catch {
        report(`${file.name || "the image"} is no image that this browser can read`, true);
      }
    }
    reading -= 1;
    draw();
  }

  function picture(url, number) {
    const image = document.createElement("img");
    image.src = url;
    image.alt = `Image ${number}`;
    return image;
  }

  function draw() {
    document.getElementById("images").replaceChildren(...urls.map((url, at) => {
      const item = document.createElement("li");
      const remove = document.createElement("button");
      remove.type = "button";
      remove.className = "small";
      remove.textContent = "Remove";
      remove.setAttribute("aria-label", `Remove image ${at + 1}`);
      remove.addEventListener("click", () => {
        urls.splice(at, 1);
        draw();
      });
      item.append(picture(url, at + 1), remove);
      return item;
    }));
  }

  // Returns the images of the message that is sent, which the next one has no more.
  function take() {
    const taken = urls;
    urls = [];
    draw();
    return taken;
  }

  const filesOf = (data) => [...(data?.files || [])].filter((file) => file.type.startsWith("image/"));

  function listen(tell) {
    report = tell;
    document.addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      if (!files.length) return;
      event.preventDefault();
      add(files);
    });
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault(); // or the browser leaves the page for the file
      const files = filesOf(event.dataTransfer);
      if (files.length) add(files);
      else report("only images can be dropped here", true);
    });
    const chooser = document.getElementById("files");
    document.getElementById("add").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      add([...chooser.files]);
      chooser.value = "";
    });
  }

  const isReading = () => reading > 0;

  return { isReading, listen, picture, take };
})();
