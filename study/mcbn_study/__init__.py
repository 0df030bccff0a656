"""The reproduction of Teye, Azizpour and Smith (ICML 2018): one folder an experiment."""
