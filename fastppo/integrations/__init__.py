"""The losses inside other trainers, and prompts and environments of other packages: one module a
package, which it needs to be installed."""
