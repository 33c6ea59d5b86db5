/* Opened from disk, a page may not fetch another: the search then lists titles without excerpts. */
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
