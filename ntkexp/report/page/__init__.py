"""Self-contained HTML pages of runs, sweeps, claims and explanations,
and reports in Markdown.

Each module imports only from the modules listed before it:

fonts       the letters that a page needs to write PDF files
plain_svg   a check that an SVG is a plain picture
picture     pictures as inline SVG
run_table   the table of all runs, with a small curve in each row
build       the pages

The templates are the HTML files, with style.css and the script: tables.js, pictures.js,
pdf.js, curves.js and start.js."""
