"""report.html: everything a run folder knows on one page that needs no network. Pure: no tensors, no Ray."""
