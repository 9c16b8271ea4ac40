"""What `mnemos --help` prints."""

USAGE = """mnemos: memory for transformers

  mnemos list [TASK|FAMILY|RECIPE]             list the recipes, models, attentions and tasks; the recipes of a task or
                                               a family, a recipe with its variants    [--all: every recipe]
  mnemos show RECIPE [--field value ...]       print a recipe with all its settings, as JSON
  mnemos train RECIPE [--field value ...]      train a recipe    [--out DIR] [--from RUN]
  mnemos train --resume RUN                    continue an interrupted run exactly where it stopped
                                               [--train.steps N: train it for longer] [--accept-changed-data]
  mnemos eval RUN                              evaluate a run's model, with and without its memory
                                               [--split valid|test] [--rows N] [--data.FIELD value ...: on other data]
                                               [--model.FIELD value ...: settings of how far it reads]
  mnemos predict RUN FILE ...                  print the classes of images, the words of recordings, or how texts
                                               continue (- reads the standard input)    [--top N] [--length N]
  mnemos translate RUN < FILE                  translate text, line by line    [--beams N] [--n-best N]
                                               [--length-penalty X]
  mnemos detect RUN PHOTO ...                  draw boxes and masks of objects on photos    [--out DIR] [--score S]
                                               [--json: print them in COCO's result format]
  mnemos sample RUN                            generate images or text with it    [--count N] [--length N]
                                               [--prompt TEXT] [--temperature T] [--top-k K] [--top-p P] [--seed N]
                                               [--draft RUN|lookup] [--drafted N]
  mnemos compare RECIPE [RECIPE ...] [--field value ...]
                                               train several recipes and compare them    [--seeds N] [--out DIR]
                                               [--unwritten] [--baselines] [--vary FIELD V1,V2 ...] [--jobs N]
                                               [--equal updates|samples|parameters|flops|time] [--minutes M]
                                               [--rates R1,R2: the best for each recipe] [--against NAME]
  mnemos score RUN RUN ...                     BLEU and chrF of translations, and the paired bootstrap    [--samples N]
  mnemos average RUN                           average the weights of a run's last checkpoints    [--last N] [--out DIR]
  mnemos tokenizer FILE ...                    learn sub-words from text    --out FILE [--size N] [--lowercase]
  mnemos export RUN                            write a checkpoint of Hugging Face Transformers, or programs of ONNX or
                                               torch.export    [--to hf|onnx|onnxruntime|torch] [--out DIR]
                                               [--push REPOSITORY]
  mnemos report RUN ...                        write an HTML page about runs or a comparison    [--out FILE]
  mnemos bench-memory [TASK ...]               train every memory on the benchmarks of memory    [--quick]
                                               [--memories A,B] [--seeds N] [--steps N] [--dim N] [--rates R1,R2]
                                               [--books PATH] [--jobs N] [--out DIR]
  mnemos reproduce PAPER[/CLAIM]               reproduce a table or figure of a paper    [--data DIR] [--steps N]
                                               [--seeds N] [--out DIR] [--run RUN] [--recipes-only]

Fields are settings of the recipe, for example --model.dim 128 --model.attention linear --model.cache none.
--model hf:NAME, timm:NAME or FOLDER trains a model of Hugging Face or timm further, with the recipe's cache.
RECIPE is a name, a Python file that defines one (my_file.py, or my_file.py:NAME of several), or a JSON file that
`mnemos show` printed. Every command takes --plugin FILE, a Python file that registers memories, models, tasks, recipes.
`mnemos train RECIPE --help` lists all fields, `mnemos COMMAND --help` the options of a command.
"""
