"""DeltaBox for other libraries; each module needs its extra."""
