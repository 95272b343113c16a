"""Parameters and gradients on data axes: FSDP units, their manager, and the parameters that users see."""
