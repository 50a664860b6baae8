"""The study: does Shadow Mask Distillation hold? All arms, several seeds, on one CPU (see ``docs/study.rst``)."""
