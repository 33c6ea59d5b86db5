"""The verbs, a file each: the function that `import stepscope` exports, and the command of the same name."""
