"""Pages of a run for people: report.html and report.md, from report.json and the files beside it."""
