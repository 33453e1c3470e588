"""The quantisation methods as pure functions: tensors in, tensors out; no modules, no files, no logging."""
