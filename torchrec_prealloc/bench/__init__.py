"""What every benchmark, and the demo, needs: count operations, show a table, name the machine, draw a picture.

- `counting`: copies and allocations of a batch's `.to`
- `machine`: where the figures come from
- `table`: rows as text, Markdown and JSON
- `plot`: rows as a picture
"""
