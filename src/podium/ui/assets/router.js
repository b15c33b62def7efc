// SPDX-License-Identifier: Apache-2.0
// Addresses of views: #/run/ID/TAB/MORE?key=value.

/** The parts and the query of an address. */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path
    .split("/")
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part; // a stray % in a typed address
      }
    });
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of parts and a query. */
export function addressOf(parts, query = {}) {
  const given = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  const text = given.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Goes there. */
export function go(parts, query = {}) {
  location.hash = addressOf(parts, query);
}

/** Changes the address without loading the view again, so that a reload or a copied link shows the same. */
export function remember(parts, query = {}) {
  history.replaceState(null, "", addressOf(parts, query));
}
