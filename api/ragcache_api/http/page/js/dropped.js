// What was dropped: files, and those of folders, named by their path inside the folder.

/** The files of a drop. Entries must be taken before the event ends; reading them may wait. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, name: file.name }));
  return (await Promise.all(entries.map((entry) => within(entry, "")))).flat();
}

async function within(entry, path) {
  const name = path + entry.name;
  if (entry.name.startsWith(".")) return [];
  if (entry.isFile)
    return [{ file: await new Promise((found, failed) => entry.file(found, failed)), name }];
  const children = await listed(entry.createReader());
  return (await Promise.all(children.map((child) => within(child, `${name}/`)))).flat();
}

// A reader gives a folder's entries in portions, and an empty one at the end.
async function listed(reader) {
  const all = [];
  for (;;) {
    const portion = await new Promise((found, failed) => reader.readEntries(found, failed));
    if (!portion.length) return all;
    all.push(...portion);
  }
}
