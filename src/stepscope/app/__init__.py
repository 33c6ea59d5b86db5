"""The verbs: what `import stepscope` exports, and the command line."""
